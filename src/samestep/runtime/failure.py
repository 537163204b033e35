"""What went wrong in a rank, as the launcher hears of it, and which of several failures came first."""

from __future__ import annotations

import signal
import time
import traceback
from dataclasses import dataclass

from samestep.errors import EXIT_FAILED, InputError, PeerLostError, SamestepError


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
    """

    rank: int
    when: float
    text: str
    exit_code: int
    is_consequence: bool = False
    by_signal: int | None = None
    kind: str | None = None

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Failure:
        """The failure that `error`, raised in `rank`, stands for."""
        when, kind = time.monotonic(), type(error).__name__
        if isinstance(error, InputError):
            return cls(rank, when, f"error: {error}", error.exit_code, kind=kind)
        trace = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, SamestepError):
            lost = isinstance(error, PeerLostError)
            text = f"error: {error}" if not lost else f"error: {error}\n{trace}"
            return cls(rank, when, text, error.exit_code, is_consequence=lost, kind=kind)
        return cls(rank, when, f"error: rank {rank} failed: {_title(error)}\n{trace}", EXIT_FAILED, kind=kind)

    @classmethod
    def of_exit(cls, rank: int, code: int) -> Failure:
        """The failure of a process that ended without a word; `code` is negative for a signal."""
        if code < 0:
            name = _signal_name(-code)
            how = f"was killed by {name}"
            hint = "the system kills by SIGKILL when memory runs out: see its log" if name == "SIGKILL" else None
        else:
            how, hint = f"ended with exit code {code} before it was done", None
        text = f"error: rank {rank} {how}" + (f"\n  do:   {hint}" if hint else "")
        return cls(rank, time.monotonic(), text, EXIT_FAILED, by_signal=-code if code < 0 else None)


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not a mere consequence.

    Another rank's end can make a rank raise or abort, but does not kill it. So a rank that was killed comes first,
    though others may tell of it before the launcher sees it.
    """
    causes = [failure for failure in failures if not failure.is_consequence]
    killed = [failure for failure in causes if failure.by_signal not in (None, signal.SIGABRT)]
    return min(killed or causes or failures, key=lambda failure: failure.when)


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")  # real-time signals have no names


def _title(error: BaseException) -> str:
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
