"""Watch of the process that started the ranks of a machine; the ranks end with it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

import psutil

from samestep.distributed.launcher_detection import Rendezvous
from samestep.errors import EXIT_FAILED

# Time for a step and its checkpoint after the request to stop.
_STOP_SECONDS = 6.0
_POLL_SECONDS = 1.0
_watched: list[int] = []


def watch_launcher(rendezvous: Rendezvous) -> None:
    """End this process when the process that started the ranks of this machine ends; further calls have no effect.

    The process receives SIGTERM, which requests a stop with a checkpoint inside of `samestep.start()`, and ends some
    seconds later in any case. Ranks that were started by hand are not watched: they may outlive a shell.
    """
    if _watched or rendezvous.rank_variable is None:
        return
    launcher = _nearest_ancestor_without(rendezvous.rank_variable)
    if launcher is not None:
        _watched.append(launcher)
        name = "samestep-external-launcher-watch"
        threading.Thread(target=_watch, args=(launcher, rendezvous), name=name, daemon=True).start()


def _nearest_ancestor_without(variable: str) -> int | None:
    """Return the nearest ancestor that lacks an environment variable; shells between launcher and rank have it.

    None if that is the first process of a container, which no other process outlives.
    """
    for process in psutil.Process().parents():
        try:
            is_launcher = variable not in process.environ()
        except psutil.Error:  # of another user, such as slurmstepd
            is_launcher = True
        if is_launcher:
            return int(process.pid) if process.pid > 1 else None
    return None


def _watch(launcher: int, rendezvous: Rendezvous) -> None:
    _wait_for_end(launcher)
    if rendezvous.local_rank == 0:
        with suppress(OSError, ValueError):  # the reader of standard error may be gone, too
            print(
                f"error: the process {launcher} of {rendezvous.launcher} has ended, and its ranks end with it "
                "[E_LAUNCHER_GONE]\n"
                f"  expected: {rendezvous.launcher} runs until its ranks have ended\n"
                "  fix:      start the same command again: it resumes from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_SECONDS)
    os._exit(EXIT_FAILED)


def _wait_for_end(process: int) -> None:
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # ended already, or a kernel older than 5.3
            descriptor = os.pidfd_open(process)
            select.select([descriptor], [], [])
            os.close(descriptor)
            return
    while psutil.pid_exists(process):
        time.sleep(_POLL_SECONDS)
