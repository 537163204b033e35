"""Fork server of the ranks, and the end of processes that ranks leave behind.

Importing torch takes seconds, so this happens only once: a fork server (`multiprocessing`) imports
torch, and every rank is a fork of the server. The server uses no device, so the ranks can.

Decisions: docs/decisions/launching.md
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from samestep.distributed.env import (
    FORK_SERVER,
    all_variables,
    environment_of,
    prepare_torch_environment,
    silence_torch_warnings,
    variables_of_subprocess,
)
from samestep.distributed.resources import require_machine
from samestep.distributed.signals import GROUP_SIGNALS
from samestep.distributed.standard_streams import report_line
from samestep.number_text import plural

# The first is the set-up of the server. torch._dynamo: every optimizer imports it on construction,
# which takes as long as torch.
PRELOAD = (
    "samestep.launcher.fork_server_setup",
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "cloudpickle",
    "samestep.script.unchanged",
)
# Time that a process of an ended rank has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_END_POLL_SECONDS = 0.05
_SHOWN_PROCESSES = 5
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ForkServer:
    """A running fork server.

    Attributes:
        pid: its process id.
        mark: text in the environment of the server, its forks, and their subprocesses; empty if
            other code of the process has started the server.
        environment: the variables with which it started.
    """

    pid: int
    mark: str
    environment: Mapping[str, str]


_servers: dict[int, ForkServer] = {}  # that this process has started, by process id


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
        _servers[pid] = ForkServer(pid, mark, all_variables())
    return _servers.get(pid, ForkServer(pid, "", {}))


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


def start_early(preload: Sequence[str]) -> None:
    """Start the fork server of later launches: it imports torch while this process reads its input.

    Raises:
        InputError: not even one rank can start on this machine.
    """
    require_machine(1)
    configure_server(preload)
    start_server()


def configure_server(preload: Sequence[str]) -> None:
    """Set what the fork server imports before the first fork."""
    prepare_torch_environment(loopback=False)  # each rank sets its network interface
    silence_torch_warnings()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload])
