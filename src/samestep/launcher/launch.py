"""Launch of a function on several processes of this machine, and their fork server.

Importing torch takes seconds, so this happens only once: a fork server (`multiprocessing`) imports torch, and every
rank is a fork of the server. The server uses no device, so the ranks can.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil

from samestep.distributed.env import (
    FORK_SERVER,
    HASH_SEED,
    SHARE_GPU,
    prepare_torch_environment,
    silence_torch_warnings,
    variables_of_subprocess,
)
from samestep.distributed.launcher_detection import free_loopback_socket
from samestep.distributed.signals import GROUP_SIGNALS
from samestep.distributed.status import StatusBoard
from samestep.errors import InputError
from samestep.launcher.failure import RankError, StoppedError
from samestep.launcher.host_workers import HostWorkerGroup
from samestep.launcher.hosts import Place
from samestep.launcher.pickling import portable, unpack
from samestep.launcher.preflight import require_machine
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER, StackFile
from samestep.launcher.worker import WorkerSpec
from samestep.launcher.worker_group import RANK_NAME, LaunchConfig, WorkerGroup, report_line
from samestep.units import plural

__all__ = ["LaunchConfig", "RankError", "StoppedError", "launch"]

SETUP = "samestep.launcher.fork_server_setup"  # the first module that the server imports
# Time that a process whose rank has ended has to end: by itself, after SIGTERM, and after SIGKILL.
_END_SECONDS = 1.0
_END_POLL_SECONDS = 0.05
# Longest time in which the kernel is expected to load the program of the fork server.
_START_SECONDS = 10.0
_START_POLL_SECONDS = 0.001
_SHOWN_PROCESSES, _SHOWN_CHARACTERS = 5, 60
# torch._dynamo: every optimizer imports it on construction, which takes as long as torch itself.
PRELOAD = (
    SETUP,
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "cloudpickle",
    "samestep.engine.engine",
    "samestep.data.loader",
)


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch."""

    value: Any  # of rank 0; None on a host without rank 0
    stop_signal: int | None  # signal that requested the end of the run, if any


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    log_dir: Path | None = None,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hang_after: float = HANG_AFTER,
    grace: float | None = None,
    share_gpu: bool = False,
) -> Any:
    """Run `function(*arguments)` in `processes` ranks on this machine.

    Each rank joins the others with `samestep.start()`. SIGINT, SIGTERM, SIGUSR1 and SIGHUP request the end at a step
    boundary; a second SIGINT ends all ranks at once. No rank outlives this process.

    Args:
        function: importable by name, as for `multiprocessing`, or defined in a notebook.
        *arguments: positional arguments of `function`.
        processes: number of ranks, at least 1.
        log_dir: folder for the output of ranks other than 0, one file per rank; None for the terminal.
        preload: further installed modules to import once for all ranks (effective in the first launch of a process).
        environment: variables to set in each rank before torch initializes devices.
        hang_after: seconds without progress of any rank after which the run is ended, with the stacks of all ranks.
        grace: seconds that ranks have to end after a request; None without a limit.
        share_gpu: several ranks may use one GPU, as in `samestep.start`.

    Returns:
        The result of rank 0, with tensors on the CPU.

    Raises:
        InputError: `processes` or a number of seconds is not positive, or this process is itself a rank.
        RankError: a rank failed; the others were ended.
        StoppedError: the run was stopped before the end of a step.
    """
    config = LaunchConfig(hang_after, grace, log_dir=log_dir)
    call = portable(partial(function, *arguments))
    environment = {**(environment or {}), **({SHARE_GPU: "1"} if share_gpu else {})}
    return run_workers(call, processes=processes, launch_config=config, preload=preload, environment=environment).value


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    launch_config: LaunchConfig,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run a function as `launch` does, with a `LaunchConfig`; the result includes the stop signal."""
    _require_valid(processes, launch_config)
    require_machine(processes)
    hosts = launch_config.hosts
    prepare_torch_environment(loopback=False)  # each rank sets its network interface
    silence_torch_warnings()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload])
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")
    if launch_config.has_own_hash_seeds:
        context = multiprocessing.get_context("spawn")
    log_dir = launch_config.log_dir
    with ExitStack() as stack:
        listener = stack.enter_context(free_loopback_socket()) if hosts is None else hosts.listener
        if hosts is None:
            assert listener is not None
            place = Place((processes,), 0, *listener.getsockname()[:2])
        else:
            place = hosts.place
        status_board = stack.enter_context(closing(StatusBoard.create(place.size)))
        worker_group = (
            WorkerGroup(status_board, launch_config)
            if hosts is None
            else HostWorkerGroup(status_board, launch_config, hosts)
        )
        stack.enter_context(worker_group.signals())
        try:
            server = start_server()
            stack.callback(_report_orphans, server)
            for rank in place.ranks_of(place.host):
                worker_spec = WorkerSpec(
                    rank=rank,
                    place=place,
                    listener=listener if rank == 0 else None,
                    function=partial(function, *arguments),
                    log=log_dir / f"rank-{rank}.log" if log_dir is not None and rank > 0 else None,
                    status_board=status_board,
                    stacks=stack.enter_context(closing(StackFile())),
                    environment=environment or {},
                    timeout=launch_config.hang_after + COLLECTIVE_MARGIN_SECONDS,
                    server=os.getpid() if launch_config.has_own_hash_seeds else server.pid,
                )
                variables = {HASH_SEED: str(rank)} if launch_config.has_own_hash_seeds else {}
                with variables_of_subprocess(variables):
                    worker_group.start(context, worker_spec)
            packed = worker_group.wait_for_all()
        finally:
            worker_group.end()
    return LaunchResult(unpack(packed) if packed else None, worker_group.stop_signal)


def _require_valid(processes: int, config: LaunchConfig) -> None:
    if processes < 1:
        fix = "--processes 1, or --processes auto"
        raise InputError(f"processes is {processes}", expected="processes >= 1", fix=fix, code="E_LAUNCH")
    for name, seconds, fix in (
        ("hang_after", config.hang_after, "--hang-after 600"),
        ("grace", config.grace, "--grace 30"),
    ):
        if seconds is not None and not seconds > 0:
            problem = f"{name} is {seconds:g} s"
            raise InputError(problem, expected="more than 0 seconds", fix=fix, code="E_LAUNCH")
    if multiprocessing.current_process().name.startswith(RANK_NAME):
        raise InputError(
            "samestep.launch() was called in a rank that samestep has started",
            expected="a process that is not a rank",
            fix="call the function directly in ranks, instead of launch",
            code="E_LAUNCH",
        )


def _report_orphans(server: ForkServer) -> None:
    if message := end_orphans(server):
        report_line(message)


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
    marked = [process for process in psutil.process_iter() if _variables(process.pid).get(FORK_SERVER) == server.mark]
    descendants = {server.pid}
    with suppress(psutil.NoSuchProcess):
        descendants |= {process.pid for process in psutil.Process(server.pid).children(recursive=True)}
    return [process for process in marked if process.pid not in descendants]


def _variables_of_new(process: int) -> dict[str, str]:
    """Return the environment of a process that has just been started: it is empty until `execve` has ended."""
    deadline = time.monotonic() + _START_SECONDS
    while not (variables := _variables(process)) and psutil.pid_exists(process) and time.monotonic() < deadline:
        time.sleep(_START_POLL_SECONDS)
    return variables


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
