"""Failures of ranks, and the first cause among several."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.distributed.disk_operations import regular_file
from samestep.distributed.torch_errors import (
    fix_lines,
    is_backend_error,
    is_lost_connection,
    operator_without_kernel,
    reason_of,
)
from samestep.errors import EXIT_FAILED, EXIT_STOPPED, PeerLostError, SamestepError
from samestep.report_text import bounded, class_name, cut_text, indented, message_of, printable

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
    for name in ("launcher", "script", "tools", "view", "parallelize.py")
)
_MODULE = str(Path("torch/nn/modules/module.py"))  # its frames only call a forward
# Lines that mark a part of the line above with carets, in tracebacks of Python 3.11 and later.
_MARKS = re.compile(r"^ +[~^]+\n", re.MULTILINE)
E_DISK_HANG = "E_DISK_HANG"
# Exit code of a process that launches while it imports the script, before it has a channel.
EXIT_UNGUARDED = 87


def _signal_name(number: int) -> str:
    names = {int(known): known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")  # real-time signals have no names


@dataclass(frozen=True)
class Failure:
    """Failure of one rank."""

    rank: int
    when: float  # monotonic clock of the machine in seconds, comparable between its processes
    text: (
        str  # complete report, with the traceback of an error in code; only line 1 is not indented
    )
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
    def _now(cls, rank: int, text: str, code: str, activity: str, **fields: Any) -> Failure:
        fields.setdefault("exit_code", EXIT_FAILED)
        return cls(rank, time.monotonic(), text, code=code, activity=activity, **fields)

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, activity: str = "") -> Failure:
        """Return the failure for an exception raised in `rank`."""
        kind = class_name(error)
        when = time.monotonic()  # before the texts, which may take time
        if isinstance(error, SamestepError):
            is_lost = isinstance(error, PeerLostError)
            text = f"error: {error.full_text}"
            if is_lost:
                text += f"\n{_trace(error)}"
            code = error.code
            exit_code = error.exit_code
        else:
            is_lost = is_backend_error(error) and is_lost_connection(error)
            exit_code = EXIT_FAILED
            operator = operator_without_kernel(error)
            if operator is not None:
                code = "E_NO_DETERMINISTIC_KERNEL"
                title = f"{operator} has no deterministic kernel"
            else:
                code = "E_RANK_FAILED"
                title = ": ".join(filter(None, [kind, reason_of(message_of(error))]))
            lines = [
                f"error: rank {rank} failed{_spaced(activity)}: {title} [{code}]",
                _trace(error),
            ]
            text = "\n".join([*lines, *(f"  {line}" for line in fix_lines(error))])
        failure = cls._now(
            rank, text, code, activity, exit_code=exit_code, is_consequence=is_lost, kind=kind
        )
        return replace(failure, when=when)

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
        ran a script, not a function. Without `has_begun`, it ended in the imports before.
        """
        by_signal = None
        code = "E_RANK_EXITED"
        expected: str | None
        if exit_code < 0:
            by_signal = -exit_code
            code = "E_RANK_KILLED"
            name = _signal_name(by_signal)
            problem = f"was killed by {name}{_spaced(activity)}"
            expected = None
            fix = _SIGNAL_FIXES.get(name)
        elif not has_begun and exit_code == EXIT_UNGUARDED:
            code = "E_LAUNCH"
            problem = "launches again, since each rank, a new process, imports the script"
            expected = "a script whose import launches nothing"
            fix = 'call samestep.launch() below `if __name__ == "__main__":`'
        elif not has_begun:
            problem = f"ended with exit code {exit_code}, before the function began"
            expected = (
                "each rank, a new process, can import the script that launches, and the module of "
                "the function"
            )
            fix = "see the exception above, if any"
        else:
            end = "the function returned"
            expected = "the function returns in every rank"
            if is_script:
                end = "the script ended"
                expected = "the script ends with exit code 0 in every rank"
            problem = f"ended with exit code {exit_code}{_spaced(activity)}, before {end}"
            fix = "look for sys.exit() or os._exit() in code that only this rank runs"
        title, *details = message.strip().splitlines() or [""]
        if title:
            problem += f": {title}"
        lines = [f"error: rank {rank} {problem} [{code}]", *map(indented, details)]
        if stack:
            lines += ["  Python stack, innermost last:", *(f"    {frame}" for frame in stack)]
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix:      {fix}")
        return cls._now(rank, "\n".join(lines), code, activity, by_signal=by_signal)

    @classmethod
    def of_report(
        cls, rank: int, code: str, problem: str, fix: str, activity: str, **fields: Any
    ) -> Failure:
        """Return the failure of a rank that others report; `{}` in `problem` is the activity."""
        text = f"error: {problem.format(_spaced(activity))} [{code}]\n  fix:      {fix}"
        return cls._now(rank, text, code, activity, **fields)

    @classmethod
    def of_hang(cls, rank: int, text: str, activity: str, code: str = "E_HANG") -> Failure:
        """Return the failure for a rank that the others wait for."""
        return cls._now(rank, f"error: {text}", code, activity, kind="hang")

    def reported(self, log_dir: Path | None) -> Failure:
        """Return the failure with a bounded text; the complete one is appended to a log."""
        text = bounded(self.text)
        if text != self.text and (log := self.append_to_log(log_dir)) is not None:
            text += f"\n  log:      {printable(str(log))}"
        return replace(self, text=text)

    def append_to_log(self, log_dir: Path | None) -> Path | None:
        """Append the complete text to the rank's log; return its path if this was possible."""
        if log_dir is None:
            return None
        path = log_dir / f"rank-{self.rank}.log"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8", opener=regular_file) as log:
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

    `failure` is the first cause. `steps` is the number since the start of the ranks. `is_stopping`:
    a signal had requested the end of the run before.
    """

    def __init__(self, failure: Failure, steps: int = 0, *, is_stopping: bool = False) -> None:
        super().__init__(failure.text.removeprefix("error: "), code=failure.code)
        self.failure = failure
        self.steps = steps
        self.is_stopping = is_stopping
        self.exit_code = failure.exit_code

    def with_next_step(self, text: str) -> RankError:
        """Return the error with a line on the next step, unless the input was invalid."""
        if not text or self.exit_code != EXIT_FAILED:
            return self
        report = f"{self.failure.text}\n  then: {text}"
        return RankError(replace(self.failure, text=report), self.steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.failure, self.steps)

    def __str__(self) -> str:
        return self.value  # a complete report, with the code of the failure


class StoppedError(SamestepError):
    """The run was stopped before the end of a step, or its loop ended on request."""

    exit_code = EXIT_STOPPED
    default_code = "E_STOPPED"


def _trace(error: BaseException) -> str:
    """Return the indented traceback of an error, at most a million characters.

    Frames of the ways of calls are left out around other code.
    """
    try:
        complete = traceback.TracebackException.from_exception(error)
        # An exception, and those that it came from or consists of: a chain can be longer than the
        # stack, so this is no recursion.
        waiting = [complete]
        while waiting:
            link = waiting.pop()
            link.stack = _without_own_frames(link)
            if notes := getattr(link, "__notes__", None):
                link.__notes__ = [cut_text(str(note)) for note in notes]
            waiting += filter(None, (link.__cause__, link.__context__, *(link.exceptions or ())))
        parts = list(map(cut_text, complete.format()))
    except Exception:  # boundary: formatting calls code of the user's exception
        parts = traceback.format_tb(error.__traceback__)
    trace = _MARKS.sub("", "".join(parts)).rstrip()
    return indented(cut_text(trace))


def _without_own_frames(error: traceback.TracebackException) -> traceback.StackSummary:
    """Return the frames of other code; of an error in the ways of calls, all from the script on."""
    frames = list(error.stack)
    others = [frame for frame in frames if not frame.filename.endswith(_MODULE)]
    kept = [frame for frame in others if not frame.filename.startswith(_PASSED)]
    # A syntax error names the line of the script by itself.
    is_syntax_error = error.exc_type is not None and issubclass(error.exc_type, SyntaxError)
    is_own = bool(frames) and frames[-1].filename.startswith(_PASSED)
    # A function mode calls torch's own functions.
    if is_own and not is_syntax_error and frames[-1].name != "observe":
        first = frames.index(kept[0]) if kept else 0
        kept = frames[first:]
    return traceback.StackSummary.from_list(kept)


def _spaced(activity: str) -> str:
    return f" {activity}" if activity else ""
