"""Orphans: processes of ranks that have ended, and ranks without their launcher.

The launcher of Samestep ends the processes that a rank has left running. A rank that another
launcher started ends with that launcher.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from samestep.distributed.env import FORK_SERVER, environment_of
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.streams import report_line
from samestep.errors import EXIT_FAILED
from samestep.launcher.fork_server import ForkServer
from samestep.units import plural

# Time that a process of an ended rank has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_END_POLL_SECONDS = 0.05
_SHOWN_PROCESSES = 5
_SHOWN_CHARACTERS = 60
# Time for a step and its checkpoint after the request to stop that follows the end of the launcher.
_STOP_SECONDS = 6.0
_LAUNCHER_POLL_SECONDS = 1.0
_watched: list[int] = []
_has_ended = threading.Event()  # the watched process


def end_orphans(server: ForkServer) -> str | None:
    """End the processes that have lost their rank; return a message for the user, if there were any.

    Subprocesses and forks of user code would keep memory, ports, and the pipe of `samestep ... |
    tee` open. A process in a session of its own is not ended.
    """
    if not server.mark or not environment_of(os.getpid()):  # there is no /proc
        return None
    orphans = _wait_for_end(lambda: _orphans(server))  # loader workers are about to end
    kept = [process for process in orphans if _is_detached(process)]
    ended = [process for process in orphans if process not in kept]
    texts = [f"ended {_names(ended)}, which a rank had left running"] if ended else []
    texts += (
        [f"{_names(kept)}, which a rank had started, runs on in a session of its own"]
        if kept
        else []
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        ended = _wait_for_end(
            lambda: [process for process in _orphans(server) if not _is_detached(process)]
        )
    return "; ".join(texts) or None


def _wait_for_end(processes: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Wait until the only processes are in sessions of their own, at most one second; return the rest."""
    deadline = time.monotonic() + _END_SECONDS
    while not all(map(_is_detached, remaining := processes())) and time.monotonic() < deadline:
        time.sleep(_END_POLL_SECONDS)
    return remaining


def _orphans(server: ForkServer) -> list[psutil.Process]:
    """Return the marked processes that do not descend from a rank of another launch that still runs."""
    marked = [
        process
        for process in psutil.process_iter()
        if environment_of(process.pid).get(FORK_SERVER) == server.mark
    ]
    descendants = {server.pid}
    with suppress(psutil.NoSuchProcess):
        descendants |= {
            process.pid for process in psutil.Process(server.pid).children(recursive=True)
        }
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


def watch_launcher(rendezvous: Rendezvous) -> None:
    """End this process when the process that started the ranks of this machine ends; further calls have no effect.

    The process receives SIGTERM, which requests a stop with a checkpoint inside of
    `samestep.init()`, and ends some seconds later in any case. Ranks that were started by hand are
    not watched: they may outlive a shell.
    """
    if _watched or rendezvous.rank_variable is None:
        return
    launcher = _nearest_ancestor_without(rendezvous.rank_variable)
    if launcher is not None:
        _watched.append(launcher)
        name = "samestep-external-launcher-watch"
        threading.Thread(target=_watch, args=(launcher, rendezvous), name=name, daemon=True).start()


def launcher_has_ended() -> bool:
    """Return whether the process that `watch_launcher` watches has ended, which its thread reports."""
    return _has_ended.is_set()


def _nearest_ancestor_without(variable: str) -> int | None:
    """Return the nearest ancestor that lacks an environment variable; shells between launcher and rank have it.

    None if that is the first process of a container, which no other process outlives.
    """
    for process in psutil.Process().parents():
        if variable not in environment_of(
            process.pid
        ):  # unreadable of another user, such as slurmstepd
            if process.pid > 1:
                return int(process.pid)
            return None
    return None


def _watch(launcher: int, rendezvous: Rendezvous) -> None:
    _wait_for_process(launcher)
    _has_ended.set()
    if rendezvous.local_rank == 0:
        report_line(
            f"error: the process {launcher} of {rendezvous.launcher} has ended, and its ranks end with it "
            "[E_LAUNCHER_GONE]\n"
            f"  expected: {rendezvous.launcher} runs until its ranks have ended\n"
            "  fix:      start the same command again: it resumes from the newest checkpoint"
        )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)
    os._exit(EXIT_FAILED)


def _wait_for_process(process: int) -> None:
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # ended already, or a kernel older than 5.3
            descriptor = os.pidfd_open(process)
            select.select([descriptor], [], [])
            os.close(descriptor)
            return
    while psutil.pid_exists(process):
        time.sleep(_LAUNCHER_POLL_SECONDS)
