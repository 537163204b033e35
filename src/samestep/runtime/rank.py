"""The body of a rank's process: what happens around the function that the launcher was given."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from samestep.runtime.board import Board, Pulse
from samestep.runtime.by_value import pack
from samestep.runtime.env import set_environment
from samestep.runtime.failure import Failure
from samestep.runtime.stacks import StackFile
from samestep.runtime.stop import GROUP_SIGNALS, StopRequest

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Orders:
    """What one rank's process is told.

    Attributes:
        function: runs in every rank, with `arguments`; its value is sent to the launcher.
        log: where the output of this rank goes, or None for the launcher's own terminal.
        board: where this rank shows what it does.
        stacks: where it writes its stacks when it is asked to.
        environment: variables to set before anything reads them.
        timeout: how long a collective waits for the other ranks, in seconds.
    """

    rank: int
    size: int
    port: int
    listener: socket.socket | None
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    log: Path | None
    board: Board
    stacks: StackFile
    environment: Mapping[str, str]
    timeout: float


@dataclass(frozen=True)
class Finished:
    """The function returned; `packed` is what rank 0's did, by value."""

    packed: bytes


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends (Linux, prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_launcher() -> None:
    """End this process when the launcher does, however it ends.

    The fork server would not: it lives as long as any of its children.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="samestep-launcher-watch", daemon=True).start()


def run_rank(orders: Orders, channel: Connection) -> None:
    """Run the function as one rank and report how it ended; never returns after a failure."""
    die_with_parent()  # the parent is the fork server
    _die_with_launcher()
    # Ctrl-C reaches every process of the terminal; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders.stacks.listen()
    if orders.log is not None:
        _redirect_output(orders.log)
    set_environment(orders.environment)
    pulse = orders.board.pulse(orders.rank)
    try:
        value = _call(orders, pulse)
        packed = pack(value) if orders.rank == 0 else b""
    except SystemExit as error:
        channel.send(Failure.of_exit(orders.rank, _exit_code(error), pulse.text))
        _leave(1)
    except BaseException as error:  # boundary: whatever ends the rank is reported to the launcher
        channel.send(Failure.of_exception(orders.rank, error, pulse.text))
        _leave(1)
    # torch takes a worker that was killed for one that failed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Loaders' workers ignore SIGTERM as this process does, so nobody else could end them now.
    for worker in multiprocessing.active_children():
        worker.kill()
    channel.send(Finished(packed))


def _call(orders: Orders, pulse: Pulse) -> Any:
    from samestep.runtime.session import Seat, take_seat  # torch comes with it: after output is set up

    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)  # blocked since the fork server
    take_seat(Seat(orders.rank, orders.size, orders.port, orders.listener, StopRequest(), pulse, orders.timeout))
    return orders.function(*orders.arguments)


def _exit_code(error: SystemExit) -> int:
    """What `sys.exit` was given, as Python has it: nothing is 0, and a text is printed for a 1."""
    if isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _redirect_output(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _leave(code: int) -> None:
    # Not sys.exit: tearing down a group whose peers are stuck could block or abort; loaders' worker processes
    # end with this one through their own death signal.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
