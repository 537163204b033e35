"""Functions on several forked ranks, between which `one_writer` divides the files of one folder."""

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from samestep.distributed.status import RankStatus, StatusBoard
from samestep.script.first_writer import one_writer

KEEP_BYTES = 20_000


class Rank:
    """One rank inside the block of `one_writer`."""

    def __init__(self, rank: int, writer: Any, status: RankStatus, barrier: Any) -> None:
        self.rank = rank
        self.writer = writer
        self.status = status
        self._barrier = barrier

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def exchange(self) -> None:
        """Meet the other ranks, as a training step does."""
        self.writer.exchange()
        self.meet()

    def meet(self) -> None:
        """Meet the other ranks without being ready."""
        self._barrier.wait(30)

    def first_earlier(self, seconds: float = 0.2) -> None:
        """Let rank 0 run ahead of the others."""
        time.sleep(0 if self.is_first else seconds)

    def first_later(self, seconds: float = 0.2) -> None:
        """Let the others run ahead of rank 0."""
        time.sleep(seconds if self.is_first else 0)


def on_ranks(body: Callable[[Rank], Any], folder: Path, *, ranks: int = 3, keep_bytes: int = KEEP_BYTES) -> list[Any]:
    """Run `body` in `folder` on forked ranks; return the result of each, or the text of its exception."""
    folder.mkdir(parents=True, exist_ok=True)
    board = StatusBoard(ranks)
    barrier = multiprocessing.get_context("fork").Barrier(ranks)
    with tempfile.TemporaryDirectory() as shared:
        children = []
        for rank in range(ranks):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                result = _run(body, folder, Path(shared), rank, ranks, board.rank_status(rank), barrier, keep_bytes)
                with os.fdopen(writer, "wb") as file:
                    pickle.dump(result, file)
                os._exit(0)
            os.close(writer)
            children.append((child, reader))
        results = []
        for child, reader in children:
            with os.fdopen(reader, "rb") as file:
                results.append(pickle.load(file))
            os.waitpid(child, 0)
        assert [path.name for path in Path(shared).iterdir() if path.name == "rank-1"] == []
    board.close()
    return results


def _run(body: Any, folder: Path, shared: Path, rank: int, ranks: int, status: Any, barrier: Any, keep: int) -> Any:
    os.chdir(folder)
    torch.set_num_threads(1)  # the threads of the parent do not exist after a fork, and OpenMP would wait for them
    try:
        with one_writer(rank, ranks, shared, status, keep_bytes=keep) as writer:
            result = body(Rank(rank, writer, status, barrier))
    except BaseException:
        barrier.abort()
        return traceback.format_exc()
    with suppress(threading.BrokenBarrierError):
        barrier.wait(30)  # rank 0 exists until all have ended, as in a world
    return result


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the content of each file below a folder, and None for each folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}
