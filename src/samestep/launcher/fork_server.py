"""The fork server of the ranks, and processes that ranks leave behind."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from samestep.distributed.env import FORK_SERVER, variables_of_subprocess
from samestep.distributed.signals import GROUP_SIGNALS
from samestep.units import plural

SETUP = "samestep.launcher.fork_server_setup"  # the first module that the server imports
# Time that a process whose rank has ended has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_POLL_SECONDS = 0.05
_SHOWN_PROCESSES, _SHOWN_CHARACTERS = 5, 60


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
    return ForkServer(pid, _variables(pid).get(FORK_SERVER, ""))


def _abandon(server: Any) -> None:
    """Leave a server whose socket was removed from the temporary folder; it ends with its last rank."""
    os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    folders: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if not os.path.exists(folders.get("tempdir", "")):
        folders.pop("tempdir", None)  # the next socket gets a new folder
    if not os.path.exists(tempfile.gettempdir()):
        tempfile.tempdir = None


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
        time.sleep(_POLL_SECONDS)
    return remaining


def _orphans(server: ForkServer) -> list[psutil.Process]:
    """Return the marked processes that do not descend from a rank of another launch that still runs."""
    marked = [process for process in psutil.process_iter() if _variables(process.pid).get(FORK_SERVER) == server.mark]
    descendants = {server.pid}
    with suppress(psutil.NoSuchProcess):
        descendants |= {process.pid for process in psutil.Process(server.pid).children(recursive=True)}
    return [process for process in marked if process.pid not in descendants]


def _variables(process: int) -> dict[str, str]:
    try:
        return dict(psutil.Process(process).environ())
    except (psutil.Error, OSError):  # the process has ended or belongs to another user, or there is no /proc
        return {}


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
