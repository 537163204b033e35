"""Run of a script on several processes: surroundings of a script that knows one device.

Decisions: docs/decisions/unchanged.md
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.config import Reduction, StrategyConfig
from samestep.distributed.collective_check import line_of_script
from samestep.distributed.devices import accelerator_module, is_accelerator, own_devices
from samestep.distributed.env import (
    VISIBLE_DEVICES,
    read_environment,
    set_environment,
    visible_devices_kept,
)
from samestep.distributed.logging import logger
from samestep.distributed.standard_streams import report_line
from samestep.distributed.stop_request import StoppedLoop
from samestep.distributed.world import World, all_gather, shown
from samestep.errors import EXIT_DONE, EXIT_FAILED
from samestep.launcher.pickling import ByValue
from samestep.launcher.process_group import SessionOptions
from samestep.launcher.process_state import WorkerSpec, process_state, rank_and_size
from samestep.launcher.worker import run_script
from samestep.loading import ranks_of_batches
from samestep.microbatches import MOST_MICROBATCHES, require_microbatches
from samestep.parallelize import joined_view, owner_of
from samestep.script.divided_calls import OutermostCalls
from samestep.script.first_writer import FirstWriter, one_writer
from samestep.script.loaders import own_rows_of_loaders
from samestep.script.mode import Mode, uses_samestep
from samestep.script.patches import replaced
from samestep.script.private_writes import Overlay
from samestep.script.process_end import (
    children_ended,
    exit_functions_called,
    files_closed,
    plain_start_method,
    threads_joined,
)
from samestep.script.programs import FirstRankPrograms
from samestep.script.random_bytes import equal_entropy
from samestep.script.refusals import refusals
from samestep.script.standard_input import shared_console
from samestep.script.summary import Summary
from samestep.script.wrappers import transparent_wrappers
from samestep.session import join
from samestep.view.first_calls import CallOptions
from samestep.view.parallel_module import ParallelModule
from samestep.view.view import View

# Under `exact` a number of its own: the first call of a module may have few rows.
_MICROBATCHES: dict[str, int | None] = {"fast": None, "exact": MOST_MICROBATCHES}


def run(
    script: Path,
    arguments: tuple[str, ...],
    restarts: int = 0,
    max_restarts: int = 0,
    *,
    mode: Mode,
    is_module: bool = False,
    reduction: Reduction = "fast",
    strategy: StrategyConfig | None = None,
    explains: bool = False,
) -> int:
    """Run a script in this rank.

    Args:
        script: file, or the name of a module with `is_module`.
        arguments: arguments of the script.
        restarts: number of earlier starts.
        max_restarts: largest number of restarts.
        mode: calls of models are divided in the mode `UNCHANGED`.
        is_module: run a module, as `python -m`.
        reduction: reduction of divided calls.
        strategy: `fsdp` divides the parameters of a module at its first call; `device_map` gives
            each process several devices, on which the script places parts of its model.
        explains: print details in the summary.

    Returns:
        The exit code of the script.
    """
    rank, size = rank_and_size()
    if rank == 0 and size > 1:
        report_line(f"samestep: {script} on {size} processes: {mode}")
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    if mode is Mode.UNCHANGED:
        surroundings = partial(unchanged, reduction, strategy, explains=explains)
    try:
        run_script(
            *(script, arguments, restarts, max_restarts),
            own_group=mode is Mode.OWN_GROUP,
            is_module=is_module,
            surroundings=surroundings,
        )
    except SystemExit as end:
        # All ranks of an unchanged script end at the same point.
        if mode is not Mode.UNCHANGED:
            raise
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0) & 0xFF  # as the system keeps it
        print(end.code, file=sys.stderr)  # text, as Python does
        return EXIT_FAILED
    return EXIT_DONE


def call(function: Callable[[], Any]) -> Any:
    """Return the result of a function in this rank.

    The calls of its models are divided unless it uses Samestep.
    """
    if isinstance(function, ByValue):
        function = function.function
    if uses_samestep(function):
        return function()
    with unchanged():
        return function()


@contextmanager
def unchanged(
    reduction: Reduction = "fast",
    strategy: StrategyConfig | None = None,
    *,
    explains: bool = False,
) -> Iterator[Summary]:
    """Surround a script that knows one device, during the block.

    Args:
        reduction: reduction of divided calls.
        strategy: strategy of the world.
        explains: print details in the summary.

    Yields:
        Summary of the divided calls and readings of this rank.
    """
    rank, size = rank_and_size()
    is_reporting = rank == 0 and not process_state.is_experiment
    summary = None
    try:
        with ExitStack() as stack:
            if size == 1 and reduction == "fast":
                summary = _alone(stack)
            else:
                summary = _together(stack, reduction, strategy)
            summary.explains = explains
            yield summary
    except SystemExit:  # a usual end of a script
        if is_reporting and summary is not None:
            summary.report()
        raise
    if is_reporting:
        summary.report()


def _alone(stack: ExitStack) -> Summary:
    stack.enter_context(shared_console(0, 1, lambda data: data or b""))
    stack.enter_context(plain_start_method())
    stack.enter_context(children_ended())
    for end in (files_closed, exit_functions_called, threads_joined):
        stack.enter_context(end())
    return Summary(stack.enter_context(own_rows_of_loaders(lambda: None)))


def _together(stack: ExitStack, reduction: Reduction, strategy: StrategyConfig | None) -> Summary:
    """Join the other ranks, and give a script what it needs, until the stack is closed."""
    rank, size = rank_and_size()
    require_microbatches(None, size)
    folder = _temporary_folder() if rank == 0 else ""
    # Before `join`, which chooses the device of this rank.
    _show_own_devices(rank, strategy)
    options = SessionOptions(
        reduction=reduction, strategy=strategy, is_private=True, sees_own_devices=True
    )
    world = join(options)
    if logger.handlers:
        # Otherwise a script that configures logging would have its lines, in log files too.
        stack.enter_context(replaced(logger, propagate=False))
    view = joined_view(None, reduction)
    worker = process_state.worker
    assert worker is not None
    view.interrupt_on(worker.stop)
    worker.rank_status.show_steps()
    (folder, seed), *_ = all_gather([folder, secrets.token_hex(32)], world)
    stack.enter_context(equal_entropy(bytes.fromhex(seed), view.in_step.seeds))
    stack.enter_context(shared_console(rank, size, partial(_share, view, world)))
    stack.enter_context(refusals())
    stack.enter_context(transparent_wrappers())
    if is_accelerator(view.device):
        stack.enter_context(visible_devices_kept(_report_visible_devices))
    stack.enter_context(plain_start_method())
    stack.enter_context(children_ended())
    summary = Summary(
        stack.enter_context(own_rows_of_loaders(partial(ranks_of_batches, view))),
        size,
        has_host_times=is_accelerator(view.device),
    )
    microbatches = _MICROBATCHES[reduction]
    call_options = CallOptions(reduction=reduction, microbatches=microbatches)
    owner = partial(owner_of, options=call_options)
    if world.mesh is not None:
        owner = partial(_dividing_owner, owner, world)
    stack.enter_context(OutermostCalls(owner, summary.records).installed())
    writer = stack.enter_context(one_writer(rank, size, folder, worker.rank_status))
    programs = FirstRankPrograms(rank, folder, worker.rank_status, writer.has_passed)
    stack.enter_context(programs.installed())
    view.before_word = partial(_begin, view, writer, worker)
    # The last one ends first: threads may register functions, and both may write files.
    for end in (files_closed, exit_functions_called, threads_joined):
        stack.enter_context(end())
    stack.enter_context(_ending_on_request(view))
    return summary


def _report_visible_devices(value: str | None) -> None:
    text = "%s: CUDA_VISIBLE_DEVICES stays as it is (not %s): each rank has a device"
    logger.info(text, line_of_script(), value)


def _show_own_devices(rank: int, strategy: StrategyConfig | None) -> None:
    """Hide the devices of other ranks: `cuda:0` of the script is a device of this rank."""
    available = accelerator_module().device_count()
    if available:
        count = 1
        if strategy is not None and strategy.devices is not None:
            count = strategy.devices
        environment = read_environment()
        share = environment.sharing is not None
        names = own_devices(rank, count, environment.visible_devices, available, share=share)
        set_environment({VISIBLE_DEVICES: names})


def _dividing_owner(
    owner: Callable[[nn.Module], ParallelModule], world: World, module: nn.Module
) -> ParallelModule:
    """Divide the parameters of a module, wherever they are held; return the owner of its calls."""
    from samestep.script.held_parameters import HeldParameters  # slow to import

    assert world.group is not None
    # The first call can be an evaluation: tensors of inference mode cannot be trained.
    with shown(world.group), torch.inference_mode(False):
        held = HeldParameters(module)
        divided = owner(module)
        held.replace()
    return divided


def _begin(view: View, writer: FirstWriter | Overlay, worker: WorkerSpec) -> None:
    worker.stop.install()  # not earlier: SIGTERM must end a script that reaches no word
    writer.exchange()
    view.before_word = writer.exchange


@contextmanager
def _ending_on_request(view: View) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if not view.is_stopping:
            raise
        raise StoppedLoop from None


def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="samestep-")
    # After the end of the world.
    process_state.exit_stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _share(view: View, world: World, data: bytes | None) -> bytes:
    if world.size == 1:
        return data or b""
    view.any_rank(place="standard input")  # otherwise ranks elsewhere would take it for another
    (first, *_) = all_gather((data or b"").hex(), world)
    return bytes.fromhex(first)
