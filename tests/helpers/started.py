"""Starts the ranks of a job as other launchers do: one process per rank, identified by variables."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from helpers.system import COMMAND, IMPORT_PATH, Done
from samestep.distributed.env import RANK_VARIABLES

Variables = Callable[[int, int], Mapping[str, str]]


def free_port() -> int:
    """Return a free port that the kernel assigns to no socket by itself: one below its range."""
    choose = random.SystemRandom()  # tests with equal seeds run at the same time
    while True:
        port = choose.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def as_torchrun(port: int) -> Variables:
    """Return the variables of torchrun, without a store of the agent."""
    return lambda rank, size: {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def as_srun(job: str, restarts: int = 0) -> Variables:
    """Return the variables of Slurm 22.05 in the tasks of a step."""
    more = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    return lambda rank, size: {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": str(os.getpid()),  # other ports than tests at the same time
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        **more,
    }


class Ranks:
    """Processes that run one command, one a rank."""

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"], files: Sequence[Sequence[Path]]) -> None:
        self.processes, self._files = processes, files

    def kill(self, number: signal.Signals) -> None:
        """Send all of them a signal, as a batch system does."""
        for process in self.processes:
            process.send_signal(number)

    def must_run(self) -> None:
        """Fail with the output of all of them if one ended already."""
        codes = [process.poll() for process in self.processes]
        if any(code is not None for code in codes):
            texts = [path.read_text(encoding="utf-8") for paths in self._files for path in paths]
            raise AssertionError(f"ended early with {codes}:\n" + "\n".join(texts))

    def wait(self, timeout: float = 90) -> list[Done]:
        """How each ended, all within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        texts = [[path.read_text(encoding="utf-8") for path in paths] for paths in self._files]
        return [Done(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


@contextmanager
def ranks(
    variables: Variables,
    size: int,
    *arguments: object,
    cwd: Path,
    command: Sequence[str] = COMMAND,
    more: Mapping[str, str] | None = None,
) -> Iterator[Ranks]:
    """Start the ranks of one job; leaving the block kills those that still run."""
    bare = {
        name: value
        for name, value in os.environ.items()
        if name not in (*RANK_VARIABLES, "GLOO_SOCKET_IFNAME") and not name.startswith("SLURM_")
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"ranks-{uuid4().hex}")))
        processes, files = [], []
        for rank in range(size):
            paths = [folder / f"{rank}.{name}" for name in ("out", "err")]
            out, err = (stack.enter_context(path.open("wb")) for path in paths)
            environment = {**bare, "PYTHONPATH": IMPORT_PATH, **variables(rank, size), **(more or {})}
            process = subprocess.Popen(
                [*command, *map(str, arguments)],
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(_kill, process.pid)
            processes.append(process)
            files.append(paths)
        yield Ranks(processes, files)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


def python(*arguments: str) -> list[str]:
    """This interpreter as a command."""
    return [sys.executable, *arguments]
