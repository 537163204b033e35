"""Launch of a function on several processes of this machine, and their fork server.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil

from samestep.distributed.env import (
    FORK_SERVER,
    HASH_SEED,
    environment_of,
    prepare_torch_environment,
    sharing_variables,
    silence_torch_warnings,
    variables_of_subprocess,
)
from samestep.distributed.resources import free_loopback_socket, require_machine
from samestep.distributed.signals import GROUP_SIGNALS
from samestep.distributed.standard_streams import report_line
from samestep.distributed.status import StatusBoard
from samestep.errors import InputError
from samestep.launcher.failure import EXIT_UNGUARDED, RankError, StoppedError
from samestep.launcher.pickling import ByName, portable, unpack
from samestep.launcher.process_state import WorkerSpec
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER, StackFile
from samestep.launcher.worker_group import RANK_NAME, LaunchConfig, WorkerGroup
from samestep.units import plural

__all__ = ["LaunchConfig", "RankError", "StoppedError", "launch"]

# The first is the set-up of the server. torch._dynamo: every optimizer imports it on construction,
# which takes as long as torch itself.
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
_marks: dict[int, str] = {}  # by process id of a server that this process has started


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch."""

    value: Any  # of rank 0
    stop_signal: int | None  # signal that requested the end of the run, if any
    is_stopped: bool = False  # the loop of the function ended on request, and the value is None


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

    A function that does not use Samestep runs as a script does under `samestep run`: it takes its
    process for the only one, and the calls of its models are divided. In another one, each rank
    joins the others with `samestep.init()`. SIGINT, SIGTERM, SIGUSR1 and SIGHUP request the end at
    a step boundary; a second SIGINT ends all ranks at once. No rank outlives this process.

    Args:
        function: importable by name, as for `multiprocessing`, or defined in a notebook.
        *arguments: positional arguments of `function`.
        processes: number of ranks, at least 1.
        log_dir: folder for the output of ranks other than 0, one file per rank; None for the
            terminal.
        preload: further installed modules to import once for all ranks (effective in the first
            launch of a process).
        environment: variables to set in each rank before torch initializes devices.
        hang_after: seconds without progress of any rank after which the run is ended, with the
            stacks of all ranks.
        grace: seconds that ranks have to end after a request; None without a limit.
        share_gpu: several ranks may use one GPU, as in `samestep.init`.

    Returns:
        The result of rank 0, with tensors on the CPU.

    Raises:
        InputError: `processes` or a number of seconds is not positive, or this process is itself a
            rank.
        RankError: a rank failed; the others were ended.
        StoppedError: the run was stopped before the end of a step, or its loop ended on request.
    """
    end_unguarded_import()
    config = LaunchConfig(hang_after, grace, log_dir=log_dir)
    call = portable(partial(function, *arguments))
    environment = {**(environment or {}), **sharing_variables(is_requested=share_gpu)}
    in_mode = ByName("samestep.script.unchanged", "call")  # a higher level, which only ranks import
    result = run_workers(
        in_mode,
        call,
        processes=processes,
        launch_config=config,
        preload=preload,
        environment=environment,
    )
    if result.is_stopped:
        raise StoppedError(
            "the training loop ended on request", fix="call samestep.launch again to continue"
        )
    return result.value


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int,
    launch_config: LaunchConfig,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run a function as `launch` does; the result includes the stop signal."""
    _require_valid(processes, launch_config)
    require_machine(processes)
    _configure_server(preload)
    own_seeds = launch_config.has_own_hash_seeds
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")
    if own_seeds:
        context = multiprocessing.get_context("spawn")
    log_dir = launch_config.log_dir
    with ExitStack() as stack:
        listener = stack.enter_context(free_loopback_socket())
        status_board = stack.enter_context(closing(StatusBoard(processes)))
        worker_group = WorkerGroup(status_board, launch_config)
        stack.enter_context(worker_group.signals())
        try:
            server = start_server()
            stack.callback(_end_orphans, server)
            for rank in range(processes):
                log = log_dir / f"rank-{rank}.log" if log_dir is not None and rank > 0 else None
                worker_spec = WorkerSpec(
                    rank=rank,
                    size=processes,
                    store_address=listener.getsockname()[:2],
                    listener=None,
                    function=partial(function, *arguments),
                    log=log,
                    status_board=status_board,
                    stacks=stack.enter_context(closing(StackFile())),
                    environment=environment or {},
                    timeout=launch_config.hang_after + COLLECTIVE_MARGIN_SECONDS,
                    server=server.pid,
                )
                variables = {}
                if rank == 0:
                    worker_spec = replace(worker_spec, listener=listener)
                if own_seeds:
                    worker_spec = replace(worker_spec, server=os.getpid())
                    variables = {HASH_SEED: str(rank)}
                with variables_of_subprocess(variables):
                    worker_group.start(context, worker_spec)
            main = worker_group.wait_for_all()
        finally:
            worker_group.end()
    value = unpack(main.value) if main.value else None
    return LaunchResult(value, worker_group.stop_signal, main.is_stopped)


def end_unguarded_import() -> None:
    """End a process that launches while it imports the script, to become a rank itself.

    The launcher reports it once, by the exit code: such a process has no other means yet.
    """
    process = multiprocessing.current_process()
    is_importing = getattr(process, "_inheriting", False)
    if is_importing and process.name.startswith(RANK_NAME):
        os._exit(EXIT_UNGUARDED)


def start_early(preload: Sequence[str]) -> None:
    """Start the fork server of later launches: it imports torch while this process reads its input.

    Raises:
        InputError: not even one rank can start on this machine.
    """
    require_machine(1)
    _configure_server(preload)
    start_server()


def _configure_server(preload: Sequence[str]) -> None:
    prepare_torch_environment(loopback=False)  # each rank sets its network interface
    silence_torch_warnings()
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *preload])


def _require_valid(processes: int, config: LaunchConfig) -> None:
    launch_error = partial(InputError, code="E_LAUNCH")
    if processes < 1:
        fix = "--processes 1, or --processes auto"
        raise launch_error(f"processes is {processes}", "processes >= 1", fix)
    for name, seconds, fix in (
        ("hang_after", config.hang_after, "--hang-after 600"),
        ("grace", config.grace, "--grace 30"),
    ):
        if seconds is not None and not seconds > 0:
            raise launch_error(f"{name} is {seconds:g} s", "more than 0 seconds", fix)
    if multiprocessing.current_process().name.startswith(RANK_NAME):
        raise launch_error(
            "samestep.launch() was called in a rank that samestep has started",
            expected="a process that is not a rank",
            fix="call the function directly in ranks",
        )


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


def _end_orphans(server: ForkServer) -> None:
    """End the processes that have lost their rank, and report them.

    Subprocesses and forks of user code would keep memory, ports, and the pipe of `samestep ... |
    tee` open. A process in a session of its own is not ended.
    """
    if not server.mark or not environment_of(os.getpid()):  # there is no /proc
        return
    ended, kept = _wait_for_orphans(server)  # loader workers are about to end
    texts = []
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
