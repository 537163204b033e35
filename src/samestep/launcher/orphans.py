"""Orphans: processes that ended ranks have left behind, and their end."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from samestep.distributed.env import (
    FORK_SERVER,
    environment_of,
)
from samestep.distributed.standard_streams import report_line
from samestep.launcher.fork_server import ForkServer
from samestep.number_text import plural

# Time that a process of an ended rank has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_END_POLL_SECONDS = 0.05
_SHOWN_PROCESSES = 5
_SHOWN_CHARACTERS = 60


def end_orphans(server: ForkServer) -> None:
    """End the processes that have lost their rank, and report them.

    Subprocesses and forks of user code would keep memory, ports, and the pipe of `samestep ... |
    tee` open. A process in a session of its own is not ended.
    """
    if not server.mark or not environment_of(os.getpid()):  # there is no /proc
        return
    ended, kept = _wait_for_orphans(server)  # loader workers are about to end
    texts = []
    # Named before their end: a process that is gone has no command line.
    if ended:
        texts.append(f"ended {_names(ended)}, which a rank had left running")
    if kept:
        texts.append(f"{_names(kept)}, which a rank had started, runs on in a session of its own")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        ended, _ = _wait_for_orphans(server)
    if texts:
        report_line("; ".join(texts))


def _wait_for_orphans(server: ForkServer) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Wait one second for the end of orphans; return the others, and those in own sessions.

    Orphans are marked processes that do not descend from a rank of a launch that still runs.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        marked = [
            process
            for process in psutil.process_iter()
            if environment_of(process.pid).get(FORK_SERVER) == server.mark
        ]
        descendants = {server.pid}
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(server.pid).children(recursive=True)
            descendants |= {process.pid for process in children}
        orphans = [process for process in marked if process.pid not in descendants]
        attached = [process for process in orphans if _is_in_this_session(process)]
        if not attached or time.monotonic() >= deadline:
            return attached, [process for process in orphans if process not in attached]
        time.sleep(_END_POLL_SECONDS)


def _is_in_this_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def _names(processes: Sequence[psutil.Process]) -> str:
    names = []
    for process in processes[:_SHOWN_PROCESSES]:
        with suppress(psutil.Error):
            command = ascii(shlex.join(process.cmdline()))[1:-1]  # without control characters
            names.append(f"{process.pid} ({command[:_SHOWN_CHARACTERS]})")
    return f"{plural(len(processes), 'process')}: {', '.join(names)}"
