"""Processes that a rank has left running."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from samestep.distributed.env import (
    FORK_SERVER,
)
from samestep.launcher.fork_server import ForkServer, variables_of
from samestep.units import plural

# Time that a process whose rank has ended has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_END_POLL_SECONDS = 0.05
_SHOWN_PROCESSES, _SHOWN_CHARACTERS = 5, 60


def end_orphans(server: ForkServer) -> str | None:
    """End the processes that have lost their rank; return a message for the user, if there were any.

    Subprocesses and forks of user code would keep memory, ports, and the pipe of `samestep ... | tee` open. A process
    in a session of its own is not ended.
    """
    if not server.mark:
        return None
    orphans = _wait_for_end(lambda: _orphans(server))  # loader workers are about to end
    kept = [process for process in orphans if _is_detached(process)]
    ended = [process for process in orphans if process not in kept]
    texts = [f"ended {_names(ended)}, which a rank had left running"] if ended else []
    texts += [f"{_names(kept)}, which a rank had started, runs on in a session of its own"] if kept else []
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        ended = _wait_for_end(lambda: [process for process in _orphans(server) if not _is_detached(process)])
    return "; ".join(texts) or None


def _wait_for_end(processes: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Wait until the only processes are in sessions of their own, at most one second; return the rest."""
    deadline = time.monotonic() + _END_SECONDS
    while not all(map(_is_detached, remaining := processes())) and time.monotonic() < deadline:
        time.sleep(_END_POLL_SECONDS)
    return remaining


def _orphans(server: ForkServer) -> list[psutil.Process]:
    """Return the marked processes that do not descend from a rank of another launch that still runs."""
    marked = [process for process in psutil.process_iter() if variables_of(process.pid).get(FORK_SERVER) == server.mark]
    descendants = {server.pid}
    with suppress(psutil.NoSuchProcess):
        descendants |= {process.pid for process in psutil.Process(server.pid).children(recursive=True)}
    return [process for process in marked if process.pid not in descendants]


def _is_detached(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) != os.getsid(0)
    except ProcessLookupError:
        return True


def _names(processes: Sequence[psutil.Process]) -> str:
    """Return number, process ids and commands."""
    names = []
    for process in processes[:_SHOWN_PROCESSES]:
        with suppress(psutil.Error):
            command = ascii(shlex.join(process.cmdline()))[1:-1]  # without control characters
            names.append(f"{process.pid} ({command[:_SHOWN_CHARACTERS]})")
    return f"{plural(len(processes), 'process')}: {', '.join(names)}"
