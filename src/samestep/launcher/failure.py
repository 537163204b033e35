"""Failures of ranks, and the first cause among several failures."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.distributed.backend_errors import is_backend_error, is_lost_connection, reason_of
from samestep.errors import (
    EXIT_FAILED,
    EXIT_STOPPED,
    PeerLostError,
    SamestepError,
    bounded,
    class_name,
    indented,
    message_of,
    printable,
)
from samestep.launcher.fixes import fix_lines, operator_without_kernel

_SIGNAL_FIXES = {
    "SIGKILL": "look for an out-of-memory kill in the system log",
    "SIGSEGV": "C code of a library failed: run on one process and look at the innermost call",
    "SIGABRT": "C code of a library aborted: read its message above, or in the rank's log",
    "SIGBUS": "shared memory or a mapped file ran out of space: check /dev/shm and the disk",
}
_CODE = re.compile(r" \[E_\w+\]$")
# Code through which a call of the script passes on its way to the script's own code.
_PASSED = tuple(
    str(Path(__file__).parents[1] / name)
    for name in ("launcher", "script", "global_view.py", "view/compiled.py", "view/parallel.py")
)
# Lines that mark a part of the line above with carets, in tracebacks of Python 3.11 and later.
_MARKS = re.compile(r"^ +[~^]+\n", re.MULTILINE)
# Limit of a complete text, which is sent to the launcher and written to a log.
_MAX_TEXT = 5_000_000


E_DISK_HANG = "E_DISK_HANG"


@dataclass(frozen=True)
class Failure:
    """Failure of one rank."""

    rank: int
    when: float  # monotonic clock of the machine in seconds, comparable between its processes
    text: str  # complete report: the message, and the traceback of an error in code; only the first line is not indented
    exit_code: int  # of the launcher, if this is the first cause
    is_consequence: bool = False  # the rank only noticed the end of another rank
    by_signal: int | None = None  # signal that ended the process
    kind: str | None = None  # class name of the exception, or `hang`
    activity: str = ""  # such as `in step 7`; empty if unknown
    code: str = "E_RANK_FAILED"  # stable code of the error

    @property
    def title(self) -> str:
        """First line of the report, without prefix and code."""
        return _CODE.sub("", self.text.splitlines()[0].removeprefix("error: "))

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, activity: str = "") -> Failure:
        """Return the failure for an exception raised in `rank`."""
        when = time.monotonic()
        kind = class_name(error)
        if isinstance(error, SamestepError):
            is_lost = isinstance(error, PeerLostError)
            text = (
                f"error: {error.full_text}\n{_trace(error)}"
                if is_lost
                else f"error: {error.full_text}"
            )
            return cls(
                rank,
                when,
                text,
                error.exit_code,
                is_lost,
                kind=kind,
                activity=activity,
                code=error.code,
            )
        code = "E_RANK_FAILED"
        operator = operator_without_kernel(error)
        if operator is not None:
            code = "E_NO_DETERMINISTIC_KERNEL"
            title = f"{operator} has no deterministic kernel"
        else:
            reason = reason_of(message_of(error))
            title = f"{kind}: {reason}" if reason else kind
        text = f"error: rank {rank} failed{_spaced(activity)}: {title} [{code}]\n{_trace(error)}"
        text += "".join(f"\n  {line}" for line in fix_lines(error))
        is_lost = is_backend_error(error) and is_lost_connection(error)
        return cls(rank, when, text, EXIT_FAILED, is_lost, kind=kind, activity=activity, code=code)

    @classmethod
    def of_exit(
        cls,
        rank: int,
        exit_code: int,
        activity: str = "",
        stack: Sequence[str] = (),
        message: str = "",
        *,
        is_script: bool = False,
        has_begun: bool = True,
    ) -> Failure:
        """Return the failure for a process that ended without a report.

        A negative `exit_code` is a signal. `stack` has the Python frames written at a fatal signal,
        outermost first. `message` is the text of `sys.exit("text")`. With `is_script`, the process
        ran a script, not a function. Without `has_begun`, the process ended in the imports before
        the function.
        """
        by_signal = -exit_code if exit_code < 0 else None
        if by_signal is not None:
            # Real-time signals have no names.
            name = next(
                (known.name for known in signal.Signals if known == by_signal),
                f"signal {by_signal}",
            )
            problem = f"was killed by {name}{_spaced(activity)}"
            fix = _SIGNAL_FIXES.get(name)
            code = "E_RANK_KILLED"
            expected = None
        elif not has_begun:
            problem = f"ended with exit code {exit_code}, before the function began"
            code = "E_RANK_EXITED"
            expected = "each rank, a new process, can import the script that launches, and the module of the function"
            fix = 'see the exception above, if any; a script calls samestep.launch() below `if __name__ == "__main__":`'
        else:
            end = "the script ended" if is_script else "the function returned"
            problem = f"ended with exit code {exit_code}{_spaced(activity)}, before {end}"
            expected = f"{'the script ends with exit code 0' if is_script else 'the function returns'} in every rank"
            fix = "look for sys.exit() or os._exit() in code that only this rank runs"
            code = "E_RANK_EXITED"
        title, *details = message.strip().splitlines() or [""]
        lines = [
            f"error: rank {rank} {problem}{f': {title}' if title else ''} [{code}]",
            *map(indented, details),
        ]
        if stack:
            lines += ["  Python stack, innermost last:", *(f"    {frame}" for frame in stack)]
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix:      {fix}")
        text = "\n".join(lines)
        return cls(
            rank,
            time.monotonic(),
            text,
            EXIT_FAILED,
            by_signal=by_signal,
            activity=activity,
            code=code,
        )

    @classmethod
    def _of_report(
        cls, rank: int, code: str, problem: str, fix: str, activity: str, **fields: Any
    ) -> Failure:
        text = f"error: {problem} [{code}]\n  fix:      {fix}"
        return cls(
            rank, time.monotonic(), text, EXIT_FAILED, activity=activity, code=code, **fields
        )

    @classmethod
    def of_ended_process(cls, rank: int, activity: str) -> Failure:
        """Return the failure of a rank with an ended process, reported by another rank."""
        problem = f"the process of rank {rank} has ended{_spaced(activity)}"
        fix = f"read the output of rank {rank}; without any, look for an out-of-memory kill in the system log"
        return cls._of_report(rank, "E_RANK_EXITED", problem, fix, activity, is_consequence=True)

    @classmethod
    def of_fork_server(cls, activity: str) -> Failure:
        """Return the failure of all ranks after their fork server was killed."""
        problem = (
            f"the fork server of the ranks was killed{_spaced(activity)}, and they ended with it"
        )
        fix = "look for a memory limit of this machine, or an administrator, that kills processes"
        return cls._of_report(
            0, "E_LAUNCHER_GONE", problem, fix, activity, by_signal=signal.SIGKILL
        )

    @classmethod
    def of_hang(cls, rank: int, text: str, activity: str, code: str = "E_HANG") -> Failure:
        """Return the failure for a rank that the others wait for."""
        return cls(
            rank,
            time.monotonic(),
            f"error: {text}",
            EXIT_FAILED,
            kind="hang",
            activity=activity,
            code=code,
        )

    @classmethod
    def of_unkillable(cls, rank: int, process: int | None, activity: str) -> Failure:
        """Return the failure for a killed process that the kernel does not end."""
        problem = f"rank {rank}, process {process}, was killed{_spaced(activity)} and does not end"
        fix = "check the disk, the network file system or the driver for which the kernel waits"
        fields = {"is_consequence": True, "by_signal": signal.SIGKILL}
        return cls._of_report(rank, E_DISK_HANG, problem, fix, activity, **fields)

    def reported(self, log_dir: Path | None) -> Failure:
        """Return the failure with a bounded text; a longer text is appended to the rank's log in `log_dir`, if any."""
        text = bounded(self.text)
        log = self.append_to_log(log_dir) if text != self.text else None
        return replace(self, text=f"{text}\n  log:      {printable(str(log))}" if log else text)

    def append_to_log(self, log_dir: Path | None) -> Path | None:
        """Append the complete text to the rank's log; return its path, or None if the log cannot be written."""
        if log_dir is None:
            return None
        path = log_dir / f"rank-{self.rank}.log"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(printable(self.text) + "\n")
        except OSError:  # such as a full disk: the report must not depend on the log
            return None
        return path


def first_cause(failures: list[Failure]) -> Failure:
    """Return the earliest failure that is not a consequence of another.

    The end of a rank can make another rank raise or abort, but does not kill it. A killed rank
    therefore takes precedence, although other ranks may report a failure before the launcher
    notices the kill.
    """
    hangs = [failure for failure in failures if failure.kind == "hang"]
    if hangs:
        return hangs[0]  # the launcher itself caused all later failures
    causes = [failure for failure in failures if not failure.is_consequence]
    killed = [failure for failure in causes if failure.by_signal not in (None, signal.SIGABRT)]
    return min(killed or causes or failures, key=lambda failure: failure.when)


class RankError(SamestepError):
    """A rank failed; `str()` is the report of that rank.

    `failure` is the first cause. `steps` and `checkpoints` are the numbers since the start of the
    ranks. `is_stopping`: a signal had requested the end of the run before.
    """

    def __init__(
        self, failure: Failure, steps: int = 0, checkpoints: int = 0, *, is_stopping: bool = False
    ) -> None:
        super().__init__(failure.text.removeprefix("error: "), code=failure.code)
        self.failure = failure
        self.steps = steps
        self.checkpoints = checkpoints
        self.is_stopping = is_stopping
        self.exit_code = failure.exit_code

    def with_next_step(self, text: str) -> RankError:
        """Return the error with a line on the next step, unless the input was invalid or `text` is empty."""
        if not text or self.exit_code != EXIT_FAILED:
            return self
        report = f"{self.failure.text}\n  then: {text}"
        return RankError(replace(self.failure, text=report), self.steps, self.checkpoints)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.failure, self.steps, self.checkpoints)

    def __str__(self) -> str:
        return self.value  # a complete report, with the code of the failure


class StoppedError(SamestepError):
    """The run was stopped before the end of a step, or the loop of a launched function ended on request."""

    exit_code = EXIT_STOPPED
    default_code = "E_STOPPED"


def _trace(error: BaseException) -> str:
    """Return the indented traceback of an error, at most some million characters.

    Frames of the ways of calls are left out around other code.
    """
    try:
        complete = traceback.TracebackException.from_exception(error)
        for one in _chain(complete):
            one.stack = _without_own_frames(one)
        parts = list(complete.format())
    except Exception:  # boundary: formatting calls code of the user's exception
        parts = traceback.format_tb(error.__traceback__)
    trace = _MARKS.sub("", "".join(parts)).rstrip()
    if len(trace) > _MAX_TEXT:
        trace = f"{trace[: _MAX_TEXT // 2]}\n... {len(trace):,} characters ...\n{trace[-_MAX_TEXT // 2 :]}"
    return indented(trace)


def _chain(error: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception, and those that it came from or consists of; a chain can be longer than the stack."""
    waiting = [error]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += filter(None, (one.__cause__, one.__context__, *(one.exceptions or ())))


def _without_own_frames(error: traceback.TracebackException) -> traceback.StackSummary:
    """Return the frames without those of the ways of calls; if the error comes from these, from the script on."""
    frames = list(error.stack)
    kept = [frame for frame in frames if not frame.filename.startswith(_PASSED)]
    # A syntax error names the line of the script by itself.
    is_syntax_error = error.exc_type is not None and issubclass(error.exc_type, SyntaxError)
    if not is_syntax_error and frames and frames[-1] not in kept:
        kept = frames[frames.index(kept[0]) :] if kept else frames
    return traceback.StackSummary.from_list(kept)


def _spaced(activity: str) -> str:
    if activity:
        return f" {activity}"
    return ""
