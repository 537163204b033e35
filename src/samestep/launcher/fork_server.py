"""Fork server of the ranks.

Importing torch takes seconds, so this happens only once: a fork server (`multiprocessing`) imports
torch, and every rank is a fork of the server. The server uses no device, so the ranks can.

Decisions: docs/decisions/launching.md
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

from samestep.distributed.env import (
    FORK_SERVER,
    all_variables,
    prepare_torch_environment,
    silence_torch_warnings,
    variables_of_subprocess,
)
from samestep.distributed.resources import require_machine
from samestep.distributed.stop_request import GROUP_SIGNALS

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
