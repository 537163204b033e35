"""Fork server of the ranks, and its environment."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

from samestep.distributed.env import FORK_SERVER, variables_of_subprocess
from samestep.distributed.signals import GROUP_SIGNALS

SETUP = "samestep.launcher.fork_server_setup"  # the first module that the server imports
_marks: dict[int, str] = {}  # by process id of a server that this process has started


@dataclass(frozen=True)
class ForkServer:
    """A running fork server."""

    pid: int
    # Text in the environment of the server, its forks, and their subprocesses; empty if other code
    # of the process has started the server.
    mark: str


def start_server() -> ForkServer:
    """Start the fork server if necessary, with group signals blocked.

    Terminals send SIGINT to a whole process group, batch systems SIGTERM. The server must survive
    them, because the ranks end with the server; and a new fork handles a pending SIGTERM once its
    handlers are installed.
    """
    server: Any = forkserver._forkserver
    running = server._forkserver_pid
    # The kernel reports the end of a thread as that of the parent; the main thread ends with the
    # process.
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
    if pid != running:
        _marks[pid] = mark
    return ForkServer(pid, _marks.get(pid, ""))
