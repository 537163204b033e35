"""Fork server of the ranks, and its environment.

Decisions: docs/decisions/launching.md
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from samestep.distributed.env import FORK_SERVER, environment_of, variables_of_subprocess
from samestep.distributed.signals import GROUP_SIGNALS

SETUP = "samestep.launcher.fork_server_setup"  # the first module that the server imports
# Longest time in which the kernel is expected to load the program of the fork server.
_START_SECONDS = 10.0
_START_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class ForkServer:
    """A running fork server."""

    pid: int
    # Text in the environment of the server, its forks, and their subprocesses; empty if other code of the process has
    # started the server.
    mark: str


def start_server() -> ForkServer:
    """Start the fork server if necessary, with group signals blocked.

    Terminals send SIGINT to a whole process group, batch systems SIGTERM. The server must survive them, because the
    ranks end with the server; and a new fork handles a pending SIGTERM once its handlers are installed.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None and not os.path.exists(server._forkserver_address):
        _abandon(server)
    # The kernel reports the end of a thread as that of the parent; the main thread ends with the process.
    is_main = threading.current_thread() is threading.main_thread()
    mark = f"{os.getpid() if is_main else 0}-{secrets.token_hex(8)}"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        with variables_of_subprocess({}):
            resource_tracker.ensure_running()  # unblocks two of the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        with variables_of_subprocess({FORK_SERVER: mark}):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pid = int(server._forkserver_pid)
    return ForkServer(pid, _variables_of_new(pid).get(FORK_SERVER, ""))


def _abandon(server: Any) -> None:
    """Leave a server whose socket was removed from the temporary folder; it ends with its last rank."""
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    folders: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if not os.path.exists(folders.get("tempdir", "")):
        folders.pop("tempdir", None)  # the next socket gets a new folder
    if not os.path.exists(tempfile.gettempdir()):
        tempfile.tempdir = None


def _variables_of_new(process: int) -> dict[str, str]:
    """Return the environment of a process that has just been started: it is empty until `execve` has ended."""
    deadline = time.monotonic() + _START_SECONDS
    while not (variables := environment_of(process)) and psutil.pid_exists(process) and time.monotonic() < deadline:
        time.sleep(_START_POLL_SECONDS)
    return variables
