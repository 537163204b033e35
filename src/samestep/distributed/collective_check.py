"""Collective check: all ranks confirm that they issue the same collective before it communicates.

Collectives of this package begin with a small all-reduce of a hash of their name. If hashes
differ, ranks exchange names and source lines, and every rank raises an error.

A rank that waits for others in its step cannot receive an error through the messages of the step.
`OperationMonitor`, a thread, therefore stores an operation that lasts more than a second in the
job's store, and reads those of the others.

Decisions: docs/decisions/rank-checks.md
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger

from samestep.config.exclusions import excluded
from samestep.distributed.status import RankStatus, odd_ranks, ranks_text
from samestep.distributed.torch_errors import is_lost_connection
from samestep.errors import InputError, PeerLostError, RankDesyncError

# Less than the launcher gives to the other ranks after the first failure.
_READERS_SECONDS = 0.5
_WAIT_SECONDS = 1.0  # then an operation is stored, and the difference of pending operations is read
_POLL_SECONDS = 0.25
# Of a rank's text in an error, and of its source line.
_TEXT_BYTES = 4000
_LINE_BYTES = 500

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
Line = tuple[str, int]  # file and number
# Internal folders of the package. A call site above them is more useful to a user.
_INTERNAL = tuple(
    f"{_PACKAGE}{name}{os.sep}"
    for name in ("distributed", "launcher", "reduce", "strategies", "view")
)


class PendingOperation(NamedTuple):
    """An operation that a rank has begun. Other ranks receive it as JSON."""

    number: int  # operations of the rank until this one; equal on every rank of a healthy run
    name: str
    line: str = ""  # source line of the call
    began: float = 0.0  # monotonic clock of the process


class OperationMonitor:
    """Compares operations of the calling thread that last long with those of the other ranks.

    Attributes:
        difference: the operations of the ranks that wait, by rank, once two of the same number
            differ; None otherwise.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._job_store = store
        self._rank = rank
        self._size = size
        self._thread_id = threading.get_ident()
        self._ended = threading.Event()
        self._pending: PendingOperation | None = None
        self._number = 0
        self.difference: dict[int, PendingOperation] | None = None
        # A daemon thread: the store may be lost.
        self._thread = threading.Thread(
            target=self._run, name="samestep-operation-monitor", daemon=True
        )
        if size > 1:
            self._thread.start()

    def begin(self, name: str) -> None:
        """Record the operation of this rank."""
        self._number += 1
        self._pending = PendingOperation(self._number, name, began=time.monotonic())

    def finish(self) -> None:
        """Record that this rank is in no operation."""
        self._pending = None

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)

    def _run(self) -> None:
        store = None
        stored = None
        while not self._ended.wait(_POLL_SECONDS):
            pending = self._pending
            if pending is None or time.monotonic() - pending.began < _WAIT_SECONDS:
                continue
            try:
                # A connection of its own: a blocking read of another thread would delay this one.
                if store is None:
                    clone = self._job_store.clone()  # type: ignore[attr-defined]
                    store = dist.PrefixStore("samestep/operations", clone)
                if stored is not pending:
                    line = call_site(sys._current_frames().get(self._thread_id))
                    text = json.dumps(pending._replace(line=line[-_LINE_BYTES:]))
                    store.set(str(self._rank), text)
                    stored = pending
                rows = self._read(store, pending.number)
                if len({row.name for row in rows.values()}) > 1:
                    self.difference = rows
                    self._ended.wait(_POLL_SECONDS)  # for further ranks
                    self.difference = self._read(store, pending.number)
                    return
            except dist.DistError:
                return  # the store ended with its process, which ranks and launcher notice

    def _read(self, store: dist.Store, number: int) -> dict[int, PendingOperation]:
        ranks = [rank for rank in range(self._size) if store.check([str(rank)])]
        rows = {rank: PendingOperation(*json.loads(store.get(str(rank)))) for rank in ranks}
        return {rank: row for rank, row in rows.items() if row.number == number}


class CollectiveCheck:
    """Compares the collectives of this rank with those of the other ranks.

    `rank_status` receives every wait.

    Attributes:
        before_collective: is called before each collective of the user.
    """

    def __init__(
        self,
        store: dist.Store,
        rank_status: RankStatus,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
    ) -> None:
        self._rank_status = rank_status
        self._rank = rank
        self._size = size
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = threading.get_ident()
        self.before_collective: Callable[[], None] | None = None
        self._monitor = OperationMonitor(store, rank=rank, size=size)

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Compare the end of the block, an operation of all ranks, and end the monitor."""
        name = "end of samestep.init()"
        try:
            yield
            with self._rank_status.operation(name):
                try:
                    self._compare(name)
                except PeerLostError as error:  # perhaps it ended because of the difference
                    self._raise_difference(error)
                    raise
        finally:
            self._monitor.end()

    def begin_collective(self, name: str) -> None:
        """Check a collective of the user that is called through this package.

        Raises:
            RankDesyncError: ranks issue different operations, or a rank issues none.
            PeerLostError: another rank is gone.
        """
        if self.before_collective is not None:
            self.before_collective()
        # Threads of a rank are not in step with those of other ranks.
        if threading.get_ident() == self._thread:
            self._compare(name)
            self._monitor.finish()

    def _compare(self, name: str) -> None:
        """Compare a name between ranks by one small all-reduce; raise on every rank if they differ.

        The operation is pending until `OperationMonitor.finish`.
        """
        if self._size == 1:
            return
        self._monitor.begin(name)
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        hashes = self._rows(torch.tensor([int.from_bytes(digest, "little")]))
        if len(set(hashes.flatten().tolist())) == 1:
            return
        data = json.dumps([0, name, call_site()[-_LINE_BYTES:]]).encode()
        own = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [bytes(row.tolist()).rstrip(b"\0") for row in self._rows(own)]
        rows = [PendingOperation(*json.loads(text)) for text in texts]
        raise self._difference(dict(enumerate(rows)))

    def _rows(self, own: torch.Tensor) -> torch.Tensor:
        """Gather integers, one row per rank, in a group apart from collectives of the script."""
        rows = torch.zeros(self._size, len(own), dtype=own.dtype)
        rows[self._rank] = own
        with self._rank_status.waiting("the collective check"):
            try:
                # Each element has one summand other than zero.
                work = dist.all_reduce(rows, group=self._group, async_op=True)
                try:
                    work.wait(timedelta(seconds=_WAIT_SECONDS))
                except RuntimeError as error:
                    while not work.is_completed():  # not failed
                        if self._monitor.difference is not None:
                            time.sleep(_READERS_SECONDS)
                            self._raise_difference(error)
                        time.sleep(_POLL_SECONDS)
                    work.wait()
            except RuntimeError as error:
                # Others are errors of this rank, such as one of a worker of a loader, which a
                # signal handler raises.
                if not is_lost_connection(error):
                    raise
                raise PeerLostError(
                    f"rank {self._rank} lost its connection to another rank: {error}"
                ) from error
        return rows

    def _raise_difference(self, cause: Exception) -> None:
        if self._monitor.difference is not None:
            raise self._difference(self._monitor.difference) from cause

    def _difference(self, rows: Mapping[int, PendingOperation]) -> RankDesyncError:
        """Return the error with the names and source lines of the operations of all ranks."""
        odd = odd_ranks({rank: row.name for rank, row in rows.items()})
        ranks_by_text: dict[str, list[int]] = {}
        for rank in sorted(rows, key=lambda rank: (rank not in odd, rank)):
            ranks_by_text.setdefault(f"{rows[rank].name} at {rows[rank].line}", []).append(rank)
        lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
        if missing := [rank for rank in range(self._size) if rank not in rows]:
            lines.append(f"{ranks_text(missing)}: no operation yet")
        problem = "ranks diverged"
        subject = "one rank"
        if odd:
            problem = f"{ranks_text(odd)} diverged from the other ranks"
            subject = ranks_text(odd)
        return RankDesyncError(
            "\n    ".join([problem, *lines]),
            expected="every rank issues the same steps, evaluations and collectives in the same "
            "order",
            fix=f"look near these lines for code that only {subject} runs or skips, such as "
            "`if world.is_main:`; every rank must call each operation",
        )


def call_site(innermost: FrameType | None = None) -> str:
    """Return the innermost caller outside of this package, torch and Python, as `train.py:40`.

    Without such a caller, as in `samestep train`, return the innermost line outside of internal
    folders. `innermost` is a frame of another thread.
    """
    internal = ""
    for frame, line in traceback.walk_stack(innermost or sys._getframe(1)):
        file = frame.f_code.co_filename
        if not _is_library(file):
            if os.path.isabs(file):
                file = os.path.relpath(file)
            return f"{file}:{line}"
        if not internal and file.startswith(_PACKAGE) and not file.startswith(_INTERNAL):
            internal = f"samestep/{file.removeprefix(_PACKAGE)}:{line}"
    return internal or "an unknown place"


@functools.cache
def _is_library(file: str) -> bool:
    if file.startswith(_STANDARD):
        # site-packages is inside the standard library's folder.
        return "-packages" not in file.removeprefix(_STANDARD)
    return file.startswith((_PACKAGE, _TORCH, "<frozen "))


# Files whose functions only pass a collective on, some as modes that observe torch's functions.
_ENTRIES = (
    *(dist.distributed_c10d.__file__, c10d_logger.__file__, functools.__file__, __file__),
    *(
        f"{_PACKAGE}{name.replace('/', os.sep)}.py"
        for name in ("session", "distributed/world", "view/operations", "view/rows", "view/watch")
    ),
    *(
        f"{_TORCH}{name.replace('/', os.sep)}.py"
        for name in (
            *("distributed/_functional_collectives", "distributed/nn/functional", "overrides"),
            *("utils/_contextlib", "utils/_device", "autograd/function"),
        )
    ),
)


def refuse_inside(modules: Container[Any]) -> None:
    """Refuse a collective of the script in a forward of `modules`; it is called before each.

    Ranks compute different rows there, or all the same: the result would depend on their number.
    Collectives of torch's own code pass, as those of FSDP.

    Raises:
        InputError: the calling code is the script, or a library other than torch, in such a call.
    """
    frame: FrameType | None = sys._getframe()
    name = ""
    while frame is not None and frame.f_code.co_filename in _ENTRIES:
        if "<locals>" not in frame.f_code.co_qualname:  # no wrapper
            name = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or name.startswith(("get_", "_")):
        return
    file = frame.f_code.co_filename
    if file.startswith((_PACKAGE, _TORCH)):
        return
    for outer, _ in traceback.walk_stack(frame):
        code = outer.f_code
        if not code.co_argcount or code.co_name not in ("forward", "_call_impl"):
            continue
        owner = outer.f_locals.get(code.co_varnames[0])
        if isinstance(owner, torch.nn.Module) and owner in modules:
            facts = (file, frame.f_lineno, name, type(owner).__name__)
            raise excluded("a collective in a call", *facts, error=InputError)


def intercept_all(before: Callable[[], None]) -> ExitStack:
    """Call `before` before each collective of `torch.distributed`, until the result is closed.

    Scripts import its functions by name, so a private helper that all of them call is replaced.
    """
    stack = ExitStack()
    helpers: list[tuple[ModuleType, str]] = [(dist.distributed_c10d, "_rank_not_in_group")]
    functional = sys.modules.get("torch.distributed._functional_collectives")  # slow to import
    if functional is not None:
        name = "_resolve_group"
        if not hasattr(functional, name):  # torch 2.11
            name = "_resolve_group_name"
        helpers.append((functional, name))
    for module, helper in helpers:
        original = getattr(module, helper)

        def checked(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            before()
            return original(*arguments)

        setattr(module, helper, checked)
        stack.callback(setattr, module, helper, original)
    return stack


@functools.cache
def is_library_file(name: str) -> bool:
    """Whether a file of code belongs to Python, to an installed library or to this package."""
    if name.startswith("<frozen") or "site-packages" in name or "dist-packages" in name:
        return True
    return name.startswith((_STANDARD, _PACKAGE))


def script_line(frame: FrameType | None) -> Line:
    """Return the innermost line that is in no installed package, or the outermost line."""
    line = ("", 0)
    while frame is not None:
        line = (frame.f_code.co_filename, frame.f_lineno)
        if not line[0].startswith("<") and not is_library_file(line[0]):
            break
        frame = frame.f_back
    return line
