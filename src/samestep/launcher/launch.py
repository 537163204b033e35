"""Launch of a function on several processes of this machine.

Decisions: docs/decisions/launching.md
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from samestep.distributed.env import (
    HASH_SEED,
    changed_variables,
    sharing_variables,
    variables_of_subprocess,
)
from samestep.distributed.resources import free_loopback_socket, require_machine
from samestep.distributed.status import StatusBoard
from samestep.errors import InputError
from samestep.launcher.failure import EXIT_UNGUARDED, RankError, StoppedError
from samestep.launcher.fork_server import configure_server, start_server
from samestep.launcher.orphans import end_orphans
from samestep.launcher.pickling import ByName, portable, unpack
from samestep.launcher.process_state import WorkerSpec
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER, StackFile
from samestep.launcher.worker_group import RANK_NAME, LaunchConfig, WorkerGroup

__all__ = ["LaunchConfig", "RankError", "StoppedError", "launch"]


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
    configure_server(preload)
    own_seeds = launch_config.has_own_hash_seeds
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")
    if own_seeds:
        context = multiprocessing.get_context("spawn")
    log_dir = launch_config.log_dir
    with ExitStack() as stack:
        listener = stack.enter_context(free_loopback_socket())
        status_board = stack.enter_context(closing(StatusBoard(processes)))
        worker_group = WorkerGroup(status_board, launch_config)
        # Before the first rank starts: a signal must reach ranks as well.
        stack.enter_context(worker_group.stop_signals.handled())
        try:
            server = start_server()
            stack.callback(end_orphans, server)
            # Ranks that the server does not fork begin with all variables.
            changed = {} if own_seeds else changed_variables(server.environment)
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
                    environment={**changed, **(environment or {})},
                    timeout=launch_config.hang_after + COLLECTIVE_MARGIN_SECONDS,
                    server=server.pid,
                )
                variables = {}
                if rank == 0:
                    worker_spec = replace(worker_spec, listener=listener)
                if own_seeds:
                    # A spawned rank is a child of this process, and ends with it.
                    worker_spec = replace(worker_spec, server=os.getpid())
                    variables = {HASH_SEED: str(rank)}
                with variables_of_subprocess(variables):
                    worker_group.start(context, worker_spec)
            main = worker_group.wait_for_all()
        finally:
            worker_group.end()
    value = unpack(main.value) if main.value else None
    return LaunchResult(value, worker_group.stop_signals.first, main.is_stopped)


def end_unguarded_import() -> None:
    """End a process that launches while it imports the script, to become a rank itself.

    The launcher reports it once, by the exit code: such a process has no other means yet.
    """
    process = multiprocessing.current_process()
    is_importing = getattr(process, "_inheriting", False)
    if is_importing and process.name.startswith(RANK_NAME):
        os._exit(EXIT_UNGUARDED)


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
