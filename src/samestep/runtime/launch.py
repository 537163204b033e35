"""Starts the ranks of a run on this machine and sees to it that all of them end.

Importing torch takes seconds, so it happens once: a fork server (Python's own, `multiprocessing`) imports it
and every rank is a fork of that. The server touches no device, so ranks are free to.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from samestep.errors import EXIT_STOPPED, InputError, SamestepError
from samestep.runtime.env import prepare_torch_environment
from samestep.runtime.failure import Failure, first_cause
from samestep.runtime.rank import Finished, Orders, run_rank

# torch._dynamo: every optimizer imports it when it is made, which takes as long as torch itself.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "samestep.engine.step",
    "samestep.data.loader",
)

_RANK_NAME = "samestep-rank-"

# After the first failure, how long the other ranks may take to report theirs before they are killed.
_SETTLE_SECONDS = 1.0


class RankError(SamestepError):
    """A rank failed; `str()` is its own report, `exit_code` what the command should exit with."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text.removeprefix("error: "))
        self.failure = failure
        self.exit_code = failure.exit_code


class StoppedError(SamestepError):
    """Somebody asked the run to end, and it ended without reaching the end of a step."""

    exit_code = EXIT_STOPPED


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
) -> Any:
    """Run `function(*arguments)` in `processes` ranks on this machine.

    Each rank joins the others by `samestep.start()`. SIGINT and SIGTERM are passed on as a request to end at a
    step boundary; a second SIGINT ends everything at once. No rank outlives this process.

    Args:
        function: importable by name, as for `multiprocessing`.
        processes: number of ranks, at least 1.
        log_dir: where the output of ranks other than 0 goes, one file each; None leaves it on the terminal.
        preload: further modules to import once for all ranks (those of the first launch in a process count).

    Returns:
        What rank 0's function returned.

    Raises:
        InputError: `processes` is not positive, or this process is a rank itself.
        RankError: a rank failed; the others were ended.
        StoppedError: a request to end came before the ranks could take it.
    """
    if processes < 1:
        raise InputError(f"processes is {processes}", rule="processes >= 1", do="--processes 1, or --processes auto")
    if multiprocessing.current_process().name.startswith(_RANK_NAME):
        raise InputError(
            "samestep.launch() is called in a rank that samestep has started",
            rule="ranks start no ranks",
            do="let the script call its function itself when it is one of several ranks: in place of launch, or by an "
            "argument",
        )
    prepare_torch_environment(loopback=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    crew = _Crew()
    with _listener() as listener, crew.signals():
        try:
            _start_server()
            for rank in range(processes):
                log = log_dir / f"rank-{rank}.log" if log_dir is not None and rank > 0 else None
                port = listener.getsockname()[1]
                held = listener if rank == 0 else None
                crew.start(context, Orders(rank, processes, port, held, function, arguments, log))
            return crew.wait_for_all()
        finally:
            crew.end()


def _start_server() -> None:
    """Start the fork server if it does not run yet, with signals blocked that go to a whole group.

    Terminals send SIGINT so, batch systems SIGTERM. The server must not end of them, for the ranks would with it; and
    a rank that is just starting, a fork of the server, takes SIGTERM when it can listen.
    """
    # Starting the server starts Python's resource tracker first, which unblocks both signals again when it is done.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    channel: Connection
    outcome: Finished | Failure | None = None

    @property
    def is_running(self) -> bool:
        return self.process.exitcode is None


@dataclass
class _Crew:
    """The ranks as the launcher sees them."""

    members: list[_Member] = field(default_factory=list)
    asked_to_stop: int = 0

    def start(self, context: ForkServerContext, orders: Orders) -> None:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(orders, send), name=f"{_RANK_NAME}{orders.rank}")
        process.start()
        send.close()
        self.members.append(_Member(orders.rank, process, receive))
        if self.asked_to_stop:
            self._forward_stop()

    def signals(self) -> AbstractContextManager[None]:
        """Pass SIGINT and SIGTERM on while the block runs; outside the main thread they are somebody else's."""
        if threading.current_thread() is not threading.main_thread():
            return nullcontext()
        return self._signals()

    @contextmanager
    def _signals(self) -> Any:
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_stop += 1
        if self.asked_to_stop > 1 and number == signal.SIGINT:
            self.kill()
            return
        self._forward_stop()
        if number == signal.SIGINT:
            print("\nending after this step; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    def _forward_stop(self) -> None:
        for member in self.members:
            if member.is_running and member.process.pid is not None:
                os.kill(member.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        for member in self.members:
            if member.is_running:
                member.process.kill()

    def wait_for_all(self) -> Any:
        """Rank 0's value, once every rank has ended well; else the first cause, once every rank has ended."""
        deadline = float("inf")
        while running := [member for member in self.members if member.is_running]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            ends = [member.process.sentinel for member in running]
            talking = [member.channel for member in running if member.outcome is None]
            wait([*ends, *talking], timeout=None if remaining == float("inf") else remaining)
            if self._take_in() and deadline == float("inf"):
                deadline = time.monotonic() + _SETTLE_SECONDS
        self.end()
        failures = [member.outcome for member in self.members if isinstance(member.outcome, Failure)]
        if failures:
            self._raise(first_cause(failures))
        main = self.members[0].outcome
        assert isinstance(main, Finished)
        return main.value

    def end(self) -> None:
        """Kill what still runs and take in what was said last."""
        self.kill()
        for member in self.members:
            member.process.join()
            if member.outcome is None:
                killed = Failure.of_exit(member.rank, member.process.exitcode or 0)
                member.outcome = _said(member.channel) or replace(killed, is_consequence=True)

    def _raise(self, cause: Failure) -> None:
        if self.asked_to_stop and cause.by_signal in (signal.SIGTERM, signal.SIGKILL):
            raise StoppedError(
                "stopped before the end of a step", do="resume from the newest checkpoint, if there is one"
            )
        raise RankError(cause)

    def _take_in(self) -> bool:
        """Take in what ranks said and how they ended; whether one of them failed."""
        for member in self.members:
            if member.outcome is None:
                ended = not member.is_running  # asked first: what it said last is in the channel by then
                member.outcome = _said(member.channel)
                if member.outcome is None and ended:
                    member.outcome = Failure.of_exit(member.rank, member.process.exitcode or 0)
        return any(isinstance(member.outcome, Failure) for member in self.members)


def _said(channel: Connection) -> Finished | Failure | None:
    try:
        said = channel.recv() if channel.poll() else None
    except EOFError:
        return None
    assert said is None or isinstance(said, Finished | Failure)
    return said


@contextmanager
def _listener() -> Any:
    """A socket on a free loopback port that stays ours from here to rank 0's store."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener
