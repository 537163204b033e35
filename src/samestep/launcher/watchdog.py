"""Watchdog: decides from the statuses of ranks whether they hang; Python stacks of ranks.

Statuses come from shared memory in `samestep.launcher.worker_group`, and from the store of a job in
`samestep.launcher.peer_watchdog`.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from samestep.distributed.status import (
    DISK_OPERATION,
    StatusSnapshot,
    odd_ranks,
    ranks_by_value,
    ranks_text,
    unnamed_file,
)
from samestep.launcher.failure import E_DISK_HANG, Failure

HANG_AFTER = 600.0
# Extra time limit of collectives, so that the watchdog reports a hang first: a week, because the
# clock of collectives continues while a job is frozen.
COLLECTIVE_MARGIN_SECONDS = 7 * 86400.0

# Longer intervals between two checks of a watchdog mean that the watchdog itself was stopped.
_MAX_INTERVAL_SECONDS = 10.0
_SHOWN_FRAMES = 10
# Letters of proc(5).
_PROCESS_STATES = {
    "T": "stopped by a signal (SIGSTOP, a debugger)",
    "D": "waits in the kernel, which no signal ends: for a disk, a network file system or a driver",
}
_WAITING = ", waiting in "
_TORCH_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
_NO_ANSWER = "none: the process does not answer"

_STACK_SIGNAL = signal.SIGUSR2
_STACK_SECONDS = 1.0  # limit of the time for an answer
_STACK_POLL_SECONDS = 0.1  # a dump that has not grown in this time is complete
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
# Frames down to the launched function or script belong to the launcher.
_LAUNCHER_FRAME = re.compile(r"launcher.worker\.py:\d+ (_call|run_script)$")


@dataclass(frozen=True)
class RankState:
    """State of one rank as the watchdog sees it."""

    status: StatusSnapshot  # written by the rank
    has_ended: bool = False  # the process has ended without a failure
    # The kernel's letter for the state of the process (proc(5)), `T` if stopped by a signal; empty
    # without /proc.
    process_state: str = ""
    is_silent: bool = False  # the rank sends no status
    host: str = ""  # host of the rank, if ranks run on several hosts

    @property
    def disk_operation(self) -> str:
        """Disk operation in progress, such as `fsync of PATH`, of a process that is not stopped."""
        if self.process_state == "T":
            return ""
        return self.status.activity.partition(DISK_OPERATION)[2]

    @property
    def text(self) -> str:
        """Activity of the rank, and why it may not continue."""
        text = self.status.activity or "before samestep.init()"
        kernel = _PROCESS_STATES.get(self.process_state)
        if self.has_ended:
            text = f"has ended, {text}"
        elif self.is_silent:
            text += "; no status since then: the process may be stopped, or its machine lost"
        elif kernel is not None:
            text += f"; {kernel}"
        if self.host:
            return f"on host {self.host}, {text}"
        return text


@dataclass(frozen=True)
class Hang:
    """A hang: ranks without progress, and ranks that wait for them."""

    seconds: float  # time without progress
    hang_after: float  # limit of that time, in seconds
    states: Mapping[int, RankState]  # of all ranks
    # Python frames, outermost first; empty for a rank that does not answer.
    stacks: Mapping[int, Sequence[str]]

    @property
    def culprits(self) -> list[int]:
        """Ranks that the others wait for; empty if undecidable.

        In order of precedence: ranks in a disk operation, ranks that have ended while others run,
        stopped or silent ranks, ranks that do not wait, ranks that wait in another operation than
        the majority, ranks with fewer operations.
        """
        states = self.states
        if waiting_for_disk := [rank for rank, state in states.items() if state.disk_operation]:
            return waiting_for_disk
        ended = [
            rank for rank, state in states.items() if state.has_ended or state.status.is_finished
        ]
        stopped = [
            rank for rank, state in states.items() if state.process_state == "T" or state.is_silent
        ]
        # A rank can also wait in a collective of the user.
        busy = [
            rank
            for rank, state in states.items()
            if not state.status.is_waiting
            and not any(_TORCH_DISTRIBUTED in frame for frame in self.stacks.get(rank, ())[-3:])
        ]
        operations = {
            rank: state.status.activity.partition(_WAITING)[0] for rank, state in states.items()
        }
        most = max(state.status.operations for state in states.values())
        behind = [rank for rank, state in states.items() if state.status.operations < most]
        candidates = (ended, stopped, busy, odd_ranks(operations), behind)
        return next((ranks for ranks in candidates if 0 < len(ranks) < len(states)), [])

    def failure(self) -> Failure:
        """Return the failure of the first rank that the others wait for; of rank 0 if undecidable.

        The report has the activity of each rank, and its Python stack unless it waits for a disk.
        """
        culprits = self.culprits
        rank = next(iter(culprits), 0)
        activities = {rank: state.text for rank, state in self.states.items()}
        lines = [
            f"    {ranks_text(ranks)}: {text}"
            for text, ranks in ranks_by_value(activities, culprits).items()
        ]
        code = "E_HANG"
        if operation := self.states[rank].disk_operation:
            code = E_DISK_HANG
            title = f"the disk does not answer: {operation} has not returned for"
            expected = "every operation of the disk ends"
            fix = (
                "check the disk or network file system of this path; then resume from the newest "
                "checkpoint"
            )
        else:
            subject = "the ranks hang"
            frames = "the ranks"
            if culprits:
                frames = ranks_text(culprits)
                subject = f"{frames} {'hangs' if len(culprits) == 1 else 'hang'}"
            title = f"{subject}: no progress for"
            shown = {rank: tuple(stack[-_SHOWN_FRAMES:]) for rank, stack in self.stacks.items()}
            for stack, ranks in ranks_by_value(shown, culprits).items():
                lines.append(f"  stack of {ranks_text(ranks)}, innermost last:")
                lines += [f"    {frame}" for frame in stack or (_NO_ANSWER,)]
            expected = "every rank completes a step"
            fix = (
                f"look at the innermost frames of {frames}; for slow steps set a longer limit: "
                "--hang-after, launch(hang_after=...) or init(timeout=...)"
            )
        text = "\n".join(
            [
                f"{title} {self.seconds:.1f} s [{code}]",
                *lines,
                f"  expected: {expected} within {self.hang_after:g} s (--hang-after)",
                f"  fix:      {fix}",
            ]
        )
        return Failure.of_hang(rank, text, self.states[rank].status.activity, code)


def process_stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat (proc(5)) from the letter of the state on.

    They are missing for a process that has ended, and on a system without /proc.
    """
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []


def is_running(process: int) -> bool:
    """Whether a process runs."""
    fields = process_stat(process)
    return bool(fields) and fields[0] not in "ZX"  # zombie, dead


class ProgressTimer:
    """Seconds without a change of a value that a watchdog reads in short intervals.

    A job that is stopped or frozen (SIGSTOP, `docker pause`, `scontrol suspend`) stops its watchdog
    too. The pause counts as one short interval.
    """

    def __init__(self, hang_after: float) -> None:
        self._max_interval = max(1.0, min(hang_after / 4, _MAX_INTERVAL_SECONDS))
        self._last = time.monotonic()
        self._seconds = 0.0
        self._value: object = None

    def seconds_without_change(self, value: object) -> float:
        """Return the observed seconds since the value has become `value`."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._max_interval)
        self._last = now
        if value != self._value:
            self._value = value
            self._seconds = 0.0
        return self._seconds


def _prepares(state: RankState) -> bool:
    status = state.status
    is_quiet = state.has_ended or status.is_finished or state.is_silent or state.disk_operation
    return status.is_resting and not is_quiet and state.process_state not in _PROCESS_STATES


class Watchdog:
    """Periodic checks of all ranks for hangs, after `hang_after` seconds."""

    def __init__(self, hang_after: float) -> None:
        self._hang_after = hang_after
        self._timer = ProgressTimer(hang_after)

    def hang_seconds(self, states: Mapping[int, RankState]) -> float | None:
        """Return the seconds without progress of any rank if they amount to a hang.

        Ranks are not watched before the first has reached `samestep.init()` and after the last has
        left it: a program may do anything there. Nor while all of them are in code of a plain loop
        between its calls; before the first step of an optimizer, nor while one of them is: it can
        prepare data for which the others wait.
        """
        running = [
            state.status
            for state in states.values()
            if not state.has_ended and not state.status.is_finished
        ]
        if not any(status.operations for status in running if not status.is_resting):
            return None
        is_prepared = any(status.steps for status in running)
        if not is_prepared and any(map(_prepares, states.values())):
            return None
        seconds = self._timer.seconds_without_change(max(status.last_change for status in running))
        if seconds >= self._hang_after:
            return seconds
        return None


class StackFile:
    """File for the Python stacks of one rank. It can be passed to a process that is being started.

    `faulthandler` writes the stacks from a signal handler, without the interpreter: also of a rank
    stuck in C code.
    """

    def __init__(self) -> None:
        self._descriptor = unnamed_file("samestep-stacks")

    def __getstate__(self) -> Any:
        return DupFd(self._descriptor)

    def __setstate__(self, handle: Any) -> None:
        self._descriptor = handle.detach()

    def install(self) -> None:
        """In the rank: write all stacks on SIGUSR2 and on a fatal signal."""
        faulthandler.enable(self._descriptor)
        # Not chained: the default action of the signal ends the process.
        faulthandler.register(_STACK_SIGNAL, self._descriptor, all_threads=True, chain=False)

    def request(self, pid: int) -> list[str]:
        """In the launcher: return the frames of a process's main thread, outermost first.

        They are missing without an answer.
        """
        # The file keeps the answers to earlier requests.
        before = os.fstat(self._descriptor).st_size
        try:
            os.kill(pid, _STACK_SIGNAL)
        except ProcessLookupError:
            return []
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline:
            text = self._read(before)
            time.sleep(_STACK_POLL_SECONDS)
            if text.endswith("\n") and text == self._read(before):
                return parse_stack(text)
        return []

    def crash(self) -> list[str]:
        """In the launcher: return the frames written at a fatal signal, outermost first."""
        return parse_stack(self._read(0))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _read(self, begin: int) -> str:
        size = os.fstat(self._descriptor).st_size - begin
        if size > 0:
            return os.pread(self._descriptor, size, begin).decode(errors="replace")
        return ""


def parse_stack(text: str) -> list[str]:
    """Return `file:line function` for each frame of one thread of a dump, outermost first.

    The thread is the one marked as current (the crashed thread, or the main thread on request),
    otherwise the last, because a dump lists the newest thread first. Frames of the launcher are
    omitted.
    """
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            threads.append((head[1] == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(f"{frame['file']}:{frame['line']} {frame['function']}")
    last = threads[-1][1] if threads else []
    frames = next((frames for is_current, frames in threads if is_current), last)[::-1]
    launcher = [index for index, frame in enumerate(frames) if _LAUNCHER_FRAME.search(frame)]
    if launcher:
        return frames[launcher[-1] + 1 :]
    return frames
