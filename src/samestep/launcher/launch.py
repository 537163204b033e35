"""Launch of a function on several processes of this machine, and their fork server.

Importing torch takes seconds, so this happens only once: a fork server (`multiprocessing`) imports
torch, and every rank is a fork of the server. The server uses no device, so the ranks can.

Decisions: docs/decisions/launching.md
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from samestep.distributed.env import (
    HASH_SEED,
    prepare_torch_environment,
    sharing_variables,
    silence_torch_warnings,
    variables_of_subprocess,
)
from samestep.distributed.resources import free_loopback_socket, require_machine
from samestep.distributed.status import StatusBoard
from samestep.distributed.streams import report_line
from samestep.errors import InputError
from samestep.launcher.failure import RankError, StoppedError
from samestep.launcher.fork_server import SETUP, ForkServer, start_server
from samestep.launcher.orphans import end_orphans
from samestep.launcher.pickling import ByName, portable, unpack
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER, StackFile
from samestep.launcher.worker_group import RANK_NAME, LaunchConfig, WorkerGroup
from samestep.launcher.worker_spec import WorkerSpec

__all__ = ["LaunchConfig", "RankError", "StoppedError", "launch"]

# torch._dynamo: every optimizer imports it on construction, which takes as long as torch itself.
PRELOAD = (
    SETUP,
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "cloudpickle",
    "samestep.script.unchanged",
)


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
    """Run a function as `launch` does, with a `LaunchConfig`; the result includes the stop signal."""
    _require_valid(processes, launch_config)
    require_machine(processes)
    _configure_server(preload)
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")
    if launch_config.has_own_hash_seeds:
        context = multiprocessing.get_context("spawn")
    log_dir = launch_config.log_dir
    with ExitStack() as stack:
        listener = stack.enter_context(free_loopback_socket())
        status_board = stack.enter_context(closing(StatusBoard.create(processes)))
        worker_group = WorkerGroup(status_board, launch_config)
        stack.enter_context(worker_group.signals())
        try:
            server = start_server()
            stack.callback(_report_orphans, server)
            for rank in range(processes):
                worker_spec = WorkerSpec(
                    rank=rank,
                    size=processes,
                    store_address=listener.getsockname()[:2],
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
            main = worker_group.wait_for_all()
        finally:
            worker_group.end()
    value = unpack(main.value) if main.value else None
    return LaunchResult(value, worker_group.stop_signal, main.is_stopped)


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
    if processes < 1:
        fix = "--processes 1, or --processes auto"
        raise InputError(
            f"processes is {processes}", expected="processes >= 1", fix=fix, code="E_LAUNCH"
        )
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
            fix='call the function directly in ranks; in a script, launch below `if __name__ == "__main__":`',
            code="E_LAUNCH",
        )


def _report_orphans(server: ForkServer) -> None:
    if message := end_orphans(server):
        report_line(message)
