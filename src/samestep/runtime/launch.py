"""Starts the ranks of a run on this machine and sees to it that all of them end.

Importing torch takes seconds, so it happens once: a fork server (Python's own, `multiprocessing`) imports it
and every rank is a fork of that. The server touches no device, so ranks are free to.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from samestep.errors import InputError
from samestep.runtime.board import Board
from samestep.runtime.by_value import portable, unpack
from samestep.runtime.crew import RANK_NAME, Crew, RankError, StoppedError, Terms
from samestep.runtime.env import prepare_torch_environment
from samestep.runtime.rank import Orders
from samestep.runtime.stacks import StackFile
from samestep.runtime.stop import GROUP_SIGNALS
from samestep.runtime.watchdog import HANG_AFTER, LATER_SECONDS

__all__ = ["RankError", "StoppedError", "launch"]

# torch._dynamo: every optimizer imports it when it is made, which takes as long as torch itself.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "cloudpickle",
    "samestep.engine.step",
    "samestep.data.loader",
)


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hang_after: float = HANG_AFTER,
    grace: float | None = None,
) -> Any:
    """Run `function(*arguments)` in `processes` ranks on this machine.

    Each rank joins the others by `samestep.start()`. SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on as a request to
    end at a step boundary; a second SIGINT ends everything at once. No rank outlives this process.

    Args:
        function: importable by name, as for `multiprocessing`, or defined in a notebook.
        processes: number of ranks, at least 1.
        log_dir: where the output of ranks other than 0 goes, one file each; None leaves it on the terminal.
        preload: further modules to import once for all ranks (those of the first launch in a process count).
        environment: variables to set in each rank, before torch looks for devices.
        hang_after: seconds without any progress after which a run is ended, with the stacks of all ranks.
        grace: seconds that ranks have to end once they are asked to; None for as long as they need.

    Returns:
        What rank 0's function returned, tensors on the CPU.

    Raises:
        InputError: `processes` or a number of seconds is not positive, or this process is a rank itself.
        RankError: a rank failed; the others were ended.
        StoppedError: a request to end came before the ranks could take it.
    """
    terms = Terms(hang_after, grace, log_dir=log_dir)
    call = portable(partial(function, *arguments))
    return run_crew(call, processes=processes, terms=terms, preload=preload, environment=environment or {}).value


@dataclass(frozen=True)
class Outcome:
    """How a launch ended, if it ended well.

    Attributes:
        value: what rank 0's function returned.
        asked_by: the signal by which somebody asked it to end, if one did.
    """

    value: Any
    asked_by: int | None


def run_crew(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    terms: Terms,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """As `launch`, for commands: terms as one object, and who ended it is told."""
    _require_launchable(processes, terms)
    prepare_torch_environment(loopback=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    log_dir = terms.log_dir
    with _listener() as listener, ExitStack() as stack:
        board = Board.create(processes)
        stack.callback(board.close)
        crew = Crew(board, terms)
        stack.enter_context(crew.signals())
        try:
            start_server()
            for rank in range(processes):
                stacks = StackFile()
                stack.callback(stacks.close)
                orders = Orders(
                    rank=rank,
                    size=processes,
                    port=listener.getsockname()[1],
                    listener=listener if rank == 0 else None,
                    function=function,
                    arguments=arguments,
                    log=log_dir / f"rank-{rank}.log" if log_dir is not None and rank > 0 else None,
                    board=board,
                    stacks=stacks,
                    environment=environment or {},
                    timeout=terms.hang_after + LATER_SECONDS,
                )
                crew.start(context, orders)
            return Outcome(unpack(crew.wait_for_all()), crew.asked_by)
        finally:
            crew.end()


def _require_launchable(processes: int, terms: Terms) -> None:
    hang_after, grace = terms.hang_after, terms.grace
    if processes < 1:
        raise InputError(f"processes is {processes}", rule="processes >= 1", do="--processes 1, or --processes auto")
    if not hang_after > 0:
        raise InputError(f"hang_after is {hang_after:g} s", rule="more than 0 seconds", do="--hang-after 600")
    if grace is not None and not grace > 0:
        raise InputError(f"grace is {grace:g} s", rule="more than 0 seconds", do="--grace 30")
    if multiprocessing.current_process().name.startswith(RANK_NAME):
        raise InputError(
            "samestep.launch() is called in a rank that samestep has started",
            rule="ranks start no ranks",
            do="let the script call its function itself when it is one of several ranks: in place of launch, or by an "
            "argument",
        )


def start_server() -> None:
    """Start the fork server if it does not run yet, with signals blocked that go to a whole group.

    Terminals send SIGINT so, batch systems SIGTERM. The server must not end of them, for the ranks would with it; and
    a rank that is just starting, a fork of the server, takes SIGTERM when it can listen.
    """
    # Starting the server starts Python's resource tracker first, which unblocks both signals again when it is done.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _listener() -> Iterator[socket.socket]:
    """A socket on a free loopback port that stays ours from here to rank 0's store."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener
