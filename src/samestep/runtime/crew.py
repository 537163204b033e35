"""The ranks of one launch, as their launcher sees them: starting, watching, asking to end, ending."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.errors import EXIT_FAILED, EXIT_STOPPED, SamestepError
from samestep.runtime.board import Board
from samestep.runtime.failure import Failure, first_cause
from samestep.runtime.rank import Finished, Orders, run_rank
from samestep.runtime.stacks import StackFile
from samestep.runtime.stop import REQUESTS, leave_terminals, terminals
from samestep.runtime.watchdog import Hang, Seen, Watchdog, hang_text

RANK_NAME = "samestep-rank-"

# After the first failure, how long the other ranks may take to report theirs before they are killed.
_SETTLE_SECONDS = 1.0
_LOOK_SECONDS = 0.5
# What multiprocessing gives as the exit code of a fork whose server can no longer tell.
_SERVER_GONE = 255


class RankError(SamestepError):
    """A rank failed; `str()` is its own report, `exit_code` what the command should exit with.

    Attributes:
        steps: steps that the ranks had done since they were started.
        saved: checkpoints that they had written.
    """

    def __init__(self, failure: Failure, steps: int = 0, saved: int = 0) -> None:
        super().__init__(failure.text.removeprefix("error: "))
        self.failure, self.steps, self.saved = failure, steps, saved
        self.exit_code = failure.exit_code

    def with_way_out(self, text: str) -> RankError:
        """The same, with a line more on what to do; without, where it is bad input or has nothing to go on with."""
        if not text or self.exit_code != EXIT_FAILED:
            return self
        failure = replace(self.failure, text=f"{self.failure.text}\n  then: {text}")
        return RankError(failure, self.steps, self.saved)

    def __reduce__(self) -> tuple[Any, ...]:
        return RankError, (self.failure, self.steps, self.saved)


class StoppedError(SamestepError):
    """Somebody asked the run to end, and it ended without reaching the end of a step."""

    exit_code = EXIT_STOPPED


@dataclass(frozen=True)
class Terms:
    """How a launcher deals with its ranks.

    Attributes:
        hang_after: seconds without progress of any rank after which the run is ended.
        grace: seconds that ranks have to end once they are asked to, or None for as long as they need.
        until_saved: ask the ranks to end when they have written a checkpoint.
        log_dir: where the output of ranks other than 0 goes, and what ranks say that only follow another one's failure.
        tell: takes a line for the user.
    """

    hang_after: float
    grace: float | None = None
    until_saved: bool = False
    log_dir: Path | None = None
    tell: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    channel: Connection
    stacks: StackFile
    outcome: Finished | Failure | None = None

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None


class Crew:
    """The ranks of one launch.

    Attributes:
        asked_to_stop: how often somebody asked the run to end.
        asked_by: the signal that did so first, if one did.
    """

    def __init__(self, board: Board, terms: Terms) -> None:
        self._board, self._terms = board, terms
        self._members: list[_Member] = []
        self._watchdog = Watchdog(terms.hang_after)
        self.asked_to_stop = 0
        self.asked_by: int | None = None
        self._deadline = float("inf")  # when what still runs is killed
        self._is_late = False
        self._terminals = terminals()

    def start(self, context: ForkServerContext, orders: Orders) -> None:
        """Start one rank.

        Raises:
            RankError: the process that is to fork it is gone.
        """
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(orders, send), name=f"{RANK_NAME}{orders.rank}")
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise RankError(Failure.of_server("while they were started")) from error
        finally:
            send.close()
        self._members.append(_Member(orders.rank, process, receive, orders.stacks))
        if self.asked_to_stop:
            self._forward_stop()

    def signals(self) -> AbstractContextManager[None]:
        """Pass requests to end on while the block runs; outside the main thread they are somebody else's."""
        if threading.current_thread() is not threading.main_thread():
            return nullcontext()
        return self._signals()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        numbers = [n for n in (signal.SIGINT, *REQUESTS) if signal.getsignal(n) != signal.SIG_IGN]  # nohup
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop += 1
        self.asked_by = self.asked_by or number
        if number == signal.SIGHUP:
            leave_terminals(self._terminals)
        if self.asked_to_stop > 1 and number == signal.SIGINT:
            self.kill()
            return
        self._forward_stop()
        if self._terms.grace is not None and self._deadline == float("inf"):
            self._deadline, self._is_late = time.monotonic() + self._terms.grace, True
        if number == signal.SIGINT:
            self._terms.tell("\nending after this step; Ctrl-C again ends at once")

    def _forward_stop(self) -> None:
        for member in self._members:
            if member.is_running and member.process.pid is not None:
                with suppress(ProcessLookupError):  # it has just ended, which is seen a moment later
                    os.kill(member.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill what still runs."""
        for member in self._members:
            if member.is_running:
                member.process.kill()

    def wait_for_all(self) -> bytes:
        """Rank 0's value, once every rank has ended well; else the first cause, once every rank has ended."""
        next_look = time.monotonic()
        while running := [member for member in self._members if member.is_running]:
            now = time.monotonic()
            if now >= self._deadline:
                break
            ends = [member.process.sentinel for member in running]
            talking = [member.channel for member in running if member.outcome is None]
            wait([*ends, *talking], timeout=max(0.0, min(self._deadline - now, next_look - now)))
            if self._take_in():
                self._deadline, self._is_late = min(self._deadline, time.monotonic() + _SETTLE_SECONDS), False
            elif time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _LOOK_SECONDS
        self.end()
        failures = [member.outcome for member in self._members if isinstance(member.outcome, Failure)]
        if failures and all(member.process.exitcode == _SERVER_GONE for member in self._members):
            self._raise(Failure.of_server(failures[0].where), failures)
        if failures:
            self._raise(first_cause(failures), failures)
        main = self._members[0].outcome
        assert isinstance(main, Finished)
        return main.packed

    def end(self) -> None:
        """Kill what still runs and take in what was said last."""
        self.kill()
        for member in self._members:
            member.process.join()
            if member.outcome is None:
                member.outcome = _said(member.channel) or replace(self._of_exit(member), is_consequence=True)

    def _raise(self, cause: Failure, failures: list[Failure]) -> None:
        if self.asked_to_stop and cause.by_signal is not None and cause.by_signal in (*REQUESTS, signal.SIGKILL):
            late = f" within the grace time of {self._terms.grace:g} s" if self._is_late else ""
            raise StoppedError(
                f"stopped before the end of a step{late}", do="resume from the newest checkpoint, if there is one"
            )
        if self._terms.log_dir is not None:
            for failure in failures:
                if failure is not cause:
                    self._terms.log_dir.mkdir(parents=True, exist_ok=True)
                    with (self._terms.log_dir / f"rank-{failure.rank}.log").open("a", encoding="utf-8") as log:
                        log.write(failure.text + "\n")
        positions = [self._board.read(member.rank) for member in self._members]
        raise RankError(cause, max(each.steps for each in positions), positions[0].saved)

    def _take_in(self) -> bool:
        """Take in what ranks said and how they ended; whether one of them failed."""
        for member in self._members:
            if member.outcome is None:
                ended = not member.is_running  # asked first: what it said last is in the channel by then
                member.outcome = _said(member.channel)
                if member.outcome is None and ended:
                    member.outcome = self._of_exit(member)
        return any(isinstance(member.outcome, Failure) for member in self._members)

    def _of_exit(self, member: _Member) -> Failure:
        where, _, _ = self._board.read(member.rank).text.partition(", waiting in ")
        return Failure.of_exit(member.rank, member.process.exitcode or 0, where, member.stacks.crash())

    def _look(self) -> None:
        """See whether the ranks get on."""
        seen = {member.rank: self._seen(member) for member in self._members}
        if self._terms.until_saved and seen[0].position.saved and not self.asked_to_stop:
            self.asked_to_stop = 1
            self._forward_stop()
        if seconds := self._watchdog.idle(seen):
            self._end_hang(Hang(seconds, self._terms.hang_after, seen, self._stacks()))
        elif told := self._watchdog.slow(seen):
            self._terms.tell(told)

    def _seen(self, member: _Member) -> Seen:
        state = _state(member.process.pid) if member.is_running else ""
        return Seen(self._board.read(member.rank), isinstance(member.outcome, Finished), state)

    def _stacks(self) -> dict[int, list[str]]:
        return {
            member.rank: member.stacks.ask(member.process.pid)
            for member in self._members
            if member.is_running and member.process.pid is not None
        }

    def _end_hang(self, hang: Hang) -> None:
        culprit = next(iter(hang.culprits), 0)
        failure = Failure.of_hang(culprit, hang_text(hang), hang.seen[culprit].position.text)
        self._members[culprit].outcome = failure
        self._deadline = time.monotonic()


def _said(channel: Connection) -> Finished | Failure | None:
    try:
        said = channel.recv() if channel.poll() else None
    except EOFError:
        return None
    assert said is None or isinstance(said, Finished | Failure)
    return said


def _state(process: int | None) -> str:
    """The kernel's letter for what a process does (proc(5)); empty where there is no such file."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
