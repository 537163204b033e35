"""What went wrong in a rank, as the launcher hears of it, and which of several failures came first."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import EXIT_FAILED, InputError, PeerLostError, SamestepError

_SIGNAL_HINTS = {
    "SIGKILL": "the system kills by SIGKILL when memory runs out: see its log",
    "SIGSEGV": "a library's C code failed there: run it on one process, look at what is called innermost",
    "SIGABRT": "a library's C code gave up there: what it said is above, or in the rank's log",
    "SIGBUS": "shared memory or a mapped file gave out: see the room in /dev/shm and on the disk",
    "SIGXFSZ": "a file grew past the limit of this process: see ulimit -f",
    "SIGXCPU": "the limit of processor time was reached: see ulimit -t",
}
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory", re.IGNORECASE)
_EXIT_HINT = "look for sys.exit() or os._exit() that only this rank comes to"


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    Attributes:
        rank: who.
        when: seconds of the machine's monotonic clock, comparable between its processes.
        text: what the user reads: the message, and the traceback where the fault is in code.
        exit_code: what the launcher exits with if this is the cause.
        is_consequence: the rank only noticed that another one was gone.
        by_signal: the signal that ended the process, if one did.
        kind: the class of what was raised, by name, if something was.
        where: what the rank did then, such as `in engine.step 7`; empty if that is not known.
        is_of_memory: what was raised says that memory ran out.
    """

    rank: int
    when: float
    text: str
    exit_code: int
    is_consequence: bool = False
    by_signal: int | None = None
    kind: str | None = None
    where: str = ""
    is_of_memory: bool = False

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, where: str = "") -> Failure:
        """The failure that `error`, raised in `rank`, stands for."""
        when, kind = time.monotonic(), type(error).__name__
        if isinstance(error, InputError):
            return cls(rank, when, f"error: {error}", error.exit_code, kind=kind, where=where)
        trace = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, SamestepError):
            lost = isinstance(error, PeerLostError)
            text = f"error: {error}" if not lost else f"error: {error}\n{trace}"
            return cls(rank, when, text, error.exit_code, is_consequence=lost, kind=kind, where=where)
        text = f"error: rank {rank} failed{_spaced(where)}: {_title(error)}\n{trace}{_way_out(error)}"
        return cls(rank, when, text, EXIT_FAILED, kind=kind, where=where, is_of_memory=_is_of_memory(error))

    @classmethod
    def of_exit(cls, rank: int, code: int, where: str = "", stack: Sequence[str] = ()) -> Failure:
        """The failure of a process that ended without a word; `code` is negative for a signal.

        Args:
            stack: the Python frames that a fatal signal left behind, outermost first.
        """
        if code < 0:
            name = _signal_name(-code)
            how, hint = f"was killed by {name}{_spaced(where)}", _SIGNAL_HINTS.get(name)
        else:
            how, hint = f"ended with exit code {code}{_spaced(where)}, before it was done", _EXIT_HINT
        lines = [f"error: rank {rank} {how}"]
        if stack:
            lines += ["  its Python stack, innermost last:", *(f"    {frame}" for frame in stack)]
        if hint:
            lines.append(f"  do:   {hint}")
        by_signal = -code if code < 0 else None
        return cls(rank, time.monotonic(), "\n".join(lines), EXIT_FAILED, by_signal=by_signal, where=where)

    @classmethod
    def of_server(cls, where: str) -> Failure:
        """The failure of all ranks at once, because the process was killed that they are forks of."""
        text = (
            f"error: the fork server of the ranks was killed{_spaced(where)}, and they ended with it\n"
            "  do:   look for who kills processes on this machine: its memory, its administrators"
        )
        return cls(0, time.monotonic(), text, EXIT_FAILED, by_signal=signal.SIGKILL, where=where)

    @classmethod
    def of_hang(cls, rank: int, text: str, where: str) -> Failure:
        """The failure of a rank that others have waited for in vain."""
        return cls(rank, time.monotonic(), f"error: {text}", EXIT_FAILED, kind="hang", where=where)


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not a mere consequence.

    Another rank's end can make a rank raise or abort, but does not kill it. So a rank that was killed comes first,
    though others may tell of it before the launcher sees it.
    """
    hangs = [failure for failure in failures if failure.kind == "hang"]
    if hangs:
        return hangs[0]  # all that followed is our own doing
    causes = [failure for failure in failures if not failure.is_consequence]
    killed = [failure for failure in causes if failure.by_signal not in (None, signal.SIGABRT)]
    return min(killed or causes or failures, key=lambda failure: failure.when)


def _spaced(where: str) -> str:
    return f" {where}" if where else ""


def _is_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None


def _way_out(error: BaseException) -> str:
    if _is_of_memory(error):
        return (
            "\n  do:   let each rank hold less at once: more shards with more processes, a smaller model or smaller "
            "samples, or fewer loader workers"
        )
    return ""


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")  # real-time signals have no names


def _title(error: BaseException) -> str:
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
