"""`samestep.init()`: a world of all ranks from start to end, and functions of a script about it.

Decisions: docs/decisions/package.md
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from samestep.config import DeviceKind, Reduction, StrategyConfig
from samestep.distributed import world as collectives
from samestep.distributed.collective_check import CollectiveCheck, line_of_script
from samestep.distributed.env import hide_ranks
from samestep.distributed.kernels import deterministic_kernels
from samestep.distributed.rng import share_generators
from samestep.distributed.standard_streams import report_line
from samestep.distributed.status import RankStatus, local_rank_status
from samestep.distributed.stop_request import STOP_SIGNALS, StoppedLoop, StopRequest
from samestep.distributed.torch_errors import fix_lines
from samestep.distributed.world import (
    Session,
    World,
    build_world,
    destroy,
    hide_default_group,
)
from samestep.errors import EXIT_FAILED, InputError, RunError, SamestepError
from samestep.launcher.failure import Failure
from samestep.launcher.process_group import (
    Membership,
    SessionOptions,
    create_process_group,
    other_launcher,
    rank_numbers,
    set_threads,
)
from samestep.launcher.process_state import Job, process_state
from samestep.launcher.rendezvous import report_failure
from samestep.launcher.worker import end_loader_workers, exit_process

if TYPE_CHECKING:
    from samestep.loggers.logger import Logger

_EXIT_SECONDS = 10.0


@contextmanager
def start(
    *, device: DeviceKind = "auto", reduction: Reduction = "exact", threads: int = 1, **options: Any
) -> Iterator[World]:
    """Join the other ranks for a block, and yield the world.

    Arguments are those of `init`; `exact` and one thread are the defaults, and torch's default
    group is not private. The process group ends with the block.

    Raises:
        InputError: as `init`.
    """
    with _session(SessionOptions(device, reduction, threads=threads, **options)) as world:
        yield world


def init(
    *,
    device: DeviceKind = "auto",
    reduction: Reduction = "fast",
    threads: int | None = None,
    timeout: timedelta | None = None,
    strategy: StrategyConfig | None = None,
    run: str | Path | None = None,
    loggers: Sequence[Logger | str] = (),
    share_gpu: bool = False,
) -> World:
    """Join the other ranks, and return the world.

    Ranks are defined by `samestep.launch` or the `samestep` command, otherwise by the variables of
    torchrun or srun (docs/guides/launching.md), otherwise this process is the only rank.

    The world ends when the interpreter exits, when the function of `samestep.launch` returns, or at
    the end of a block: `with samestep.init():`. A second call returns the same world.
    `samestep.parallel` calls this function.

    The process group is private: the script sees neither a default group of torch nor the
    launcher's variables, such as `RANK`. On one process nothing of the script's environment
    changes. On several, all ranks start with the states of the generators of torch, NumPy and
    Python on rank 0, and ranks that compute on CPUs share the cores.

    Args:
        device: `auto` selects this rank's GPU if torch sees one, otherwise the CPU.
        reduction: `exact` requests deterministic kernels from torch; `fast` leaves torch's settings
            unchanged.
        threads: intra-op threads of this rank. None: 1 under `exact`; under `fast` unchanged on one
            process and on GPUs, otherwise a share of the cores.
        timeout: limit of the time without progress, and of collectives. None means 10 minutes, or
            the limit of the launcher, with a slightly longer one of collectives: the watchdog
            reports a hang first.
        strategy: a strategy that divides the model needs torch's default group, which is then not
            private.
        run: name of a run in `runs`, or a `Path` of its directory; None writes nothing. An existing
            run is continued.
        loggers: loggers of `World.log`, used on rank 0 and closed at the end of the world. With a
            run, they receive its events too; also `tensorboard` and `wandb` by name.
        share_gpu: several ranks may use one GPU; they communicate by gloo in place of NCCL.

    Raises:
        InputError: device, default device or mesh do not fit, a process group exists, the run
            cannot be written, or the process has a world with other options.
    """
    needs_default_group = strategy is not None and (
        strategy.name not in ("auto", "ddp") or strategy.ranks_per_model > 1
    )
    every = (device, reduction, timeout, strategy, run, tuple(loggers), share_gpu, threads)
    return join(SessionOptions(*every, is_private=not needs_default_group))


def join(options: SessionOptions) -> World:
    """Join the other ranks as `init` does, and return the world."""
    if process_state.world is not None:
        process_state.world.session.options.require_compatible(options)
        return process_state.world
    stack = process_state.exit_stack
    world = stack.enter_context(_session(options))
    if world.size > 1:
        share_generators(world.device, world.broadcast, is_main=world.is_main)
    world = replace(world, session=replace(world.session, exit_stack=stack))
    process_state.world = world
    stack.callback(setattr, process_state, "world", None)
    uncaught = UncaughtErrors(process_state.external_job, world.session.status)
    stack.push(uncaught.close)
    atexit.register(_end_script, uncaught)
    return world


@contextmanager
def _session(options: SessionOptions) -> Iterator[World]:
    worker = process_state.worker
    status = local_rank_status() if worker is None else worker.rank_status
    status.is_free = options.is_private
    own = create_process_group(options, status)
    set_threads(options, own)
    check = CollectiveCheck(status, rank=own.rank, size=own.size, timeout=own.limit)
    stop = StopRequest()
    # In a private world signals are requests in the loops of the script alone.
    if worker is not None and not options.is_private:
        stop = worker.stop
        stop.install()  # not earlier: SIGTERM must end a script that never joins
    session = Session(status, stop, check, options=options)
    if options.reduction == "exact":
        session.resources.enter_context(deterministic_kernels())
    try:
        strategy = options.strategy or StrategyConfig()
        world = build_world(own.rank, own.size, own.device, session, strategy, own.limit)
        if options.is_private:
            own = own._replace(group=hide_default_group())
            process_state.rank_place = own.rank_place  # of later worlds too
            hide_ranks()
            world = replace(world, group=own.group, is_private=True)
        with session.resources as resources:
            world = resources.enter_context(_with_loggers(world, options.run, options.loggers))
            for observer in process_state.on_world:
                observer(world)
            signals: AbstractContextManager[None] = nullcontext()
            if own.rank_place is not None and not options.is_private:
                signals = stopped_by_signals(stop, keeps_handlers=False)
            with check.until_end(), signals:
                yield world
    except StoppedLoop:  # on all ranks after the same step
        _leave(world, own)
        raise
    except BaseException:
        _leave_after_failure(own)
        raise
    _leave(world, own)


@contextmanager
def _with_loggers(
    world: World, run: str | Path | None, loggers: Sequence[Logger | str]
) -> Iterator[World]:
    """Yield the world with its loggers, and with the run if there is one."""
    if run is not None and not process_state.is_experiment:
        from samestep.runs.folder import open_run  # worlds without a run do not need these modules

        with open_run(run, loggers, world) as world_of_run:
            yield world_of_run
        return
    names = [logger for logger in loggers if isinstance(logger, str)]
    if names and run is None:
        raise InputError(
            f"the logger {names[0]!r} by its name, without a run",
            expected="a run, in whose directory the logger writes",
            fix='samestep.init(run="first", loggers=[...]), or an object such as WandbLogger(path)',
            code="E_UNKNOWN_NAME",
        )
    own = [logger for logger in loggers if not isinstance(logger, str) and world.is_main]
    with ExitStack() as stack:
        for logger in own:
            stack.callback(logger.close)
        if process_state.is_experiment:
            own = []  # values of a trial do not belong into the user's tracker
        yield replace(world, session=replace(world.session, loggers=tuple(own)))


def _leave(world: World, own: Membership) -> None:
    # Ranks leave together: a rank that destroys its group while another communicates can abort at
    # exit.
    world.barrier()
    if own.watchdog is not None:
        own.watchdog.close()
        world.barrier()  # otherwise a watchdog could find the store gone
    world.session.status.finish()
    if process_state.worker is not None:
        process_state.finished_groups.append(own.group or dist.group.WORLD)
    destroy(own.group)


def _leave_after_failure(own: Membership) -> None:
    if own.watchdog is not None:
        own.watchdog.join_if_ending()
    # With other ranks the group stays: they may wait in a collective for this rank, and the
    # teardown for them.
    if own.size == 1:
        destroy(own.group)


def stopped_by_signals(stop: StopRequest, *, keeps_handlers: bool) -> AbstractContextManager[None]:
    """Take stop signals and the first Ctrl-C inside a block as stop requests.

    Does nothing outside the main thread.

    Args:
        stop: receives the requests.
        keeps_handlers: do nothing with signals that the script handles, and in experiments: their
            commands stop scripts at once.
    """
    numbers = [signal.SIGINT, *STOP_SIGNALS]
    if keeps_handlers:
        if process_state.is_experiment:
            return nullcontext()
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        numbers = [number for number in numbers if signal.getsignal(number) in defaults]
    if numbers:
        # Registered last, so called first: multiprocessing's own function would wait for workers.
        atexit.unregister(end_loader_workers)
        atexit.register(end_loader_workers)
    return stop.handling(numbers)


class UncaughtErrors:
    """Hook for errors that a script does not catch: one rank reports, the others are silent.

    Args:
        job: the job of another launcher; None without ranks elsewhere: errors are then shown as
            Python does.
        status: activity of this rank.
    """

    def __init__(self, job: Job | None, status: RankStatus) -> None:
        self._job = job
        self._status = status
        self._hook_before = sys.excepthook
        if job is not None:
            sys.excepthook = self._hook

    def close(self, kind: type[BaseException] | None = None, *_: Any) -> None:
        """Restore the hook, unless the script has set another one, or an error will reach it."""
        if kind is None and sys.excepthook == self._hook:
            sys.excepthook = self._hook_before

    def report(self, error: BaseException) -> None:
        """Print an error, unless another rank has reported one."""
        if self._job is None:
            self._hook_before(type(error), error, error.__traceback__)
            return
        failure = Failure.of_exception(self._job.rank, error, self._status.activity)
        report_failure(self._job, failure, partial(self._show, error, failure))

    def _show(self, error: BaseException, failure: Failure) -> None:
        if isinstance(error, SamestepError):
            report_line(failure.reported(None).text)
            return
        # The traceback as the script formats it.
        self._hook_before(type(error), error, error.__traceback__)
        for line in fix_lines(error):
            report_line(f"  {line}")

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.report(error)
        else:
            self._hook_before(kind, error, trace)


def _end_script(uncaught: UncaughtErrors) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    if process_state.external_job is not None and isinstance(error, Exception):
        # The destructor of a process group waits for collectives in progress, which other ranks may
        # never join. A thread of C code ends the process at any point of the interpreter's end.
        null = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=null)
    try:
        # After an uncaught exception, other ranks may wait in a collective for this one, and the
        # teardown for them.
        kind = None if error is None else type(error)
        process_state.exit_stack.__exit__(kind, error, None)
    except Exception as failure:  # boundary: nothing is above, and an error is no exit code yet
        uncaught.report(failure)
        exit_process(EXIT_FAILED)


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files; also before `samestep.init`."""
    if process_state.world is not None:
        return process_state.world.is_main
    rank, _, _ = rank_numbers(other_launcher())
    return rank == 0


def request_stop() -> None:
    """Request the end of the training loop, on all ranks after the same step. One rank suffices.

    Ranks agree on requests inside the messages of a step. Loops over `samestep.epochs` and
    `CheckpointManager.epochs` end before the next batch; the latter write a checkpoint, unless no
    step followed the last one. The script then ends with exit code 130. A loop that has its last
    batch ends as without a request. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C are requests in a loop over
    `CheckpointManager.epochs`, unless the script has handlers of its own.
    """
    init().session.stop.is_made = True


@contextmanager
def main_first() -> Iterator[None]:
    """Run the block on rank 0 before the other ranks, such as a download that all of them read.

    If the block raises an exception on rank 0, the others run it too, and have their own. A block
    inside of another one is run as any code. Nothing limits the time of rank 0.

    Raises:
        PeerLostError: rank 0 ended in the block.
        RunError: the block has raised an exception on rank 0 only.
    """
    world = init()
    status = world.session.status
    if world.size == 1 or status.is_preparing:
        yield
        return
    has_failed = False
    if not world.is_main:
        # The wait for rank 0, which sends its value after the block.
        has_failed = collectives.all_gather(False, world)[0]
    status.is_preparing = True
    try:
        yield
    except Exception:
        has_failed = True
        raise
    finally:
        status.is_preparing = False
        if world.is_main:
            collectives.all_gather(has_failed, world)
    if has_failed:
        raise RunError(
            "the block of samestep.main_first has raised an exception on rank 0, and none here",
            expected="the same outcome on every rank",
            fix="catch the exception inside of the block",
            code="E_RANK_DESYNC",
        )


def all_gather(value: Any, world: World | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, on every rank. Collective.

    Args:
        value: a dense tensor, whose shape and dtype may differ between ranks; or a JSON value:
            number, string, boolean, None, or lists and string-keyed mappings of these. Tensors
            arrive on the device of the rank, without gradient; tuples arrive as lists.
        world: the ranks; None for those of `samestep.init`.

    Raises:
        InputError: `value` is neither a tensor nor a JSON value.
        PeerLostError: another rank ended.
    """
    values = collectives.all_gather(value, world or init())
    view = process_state.view
    if view is not None and view.ranks.size > 1 and _are_equal(values):
        text = f"{line_of_script()}: samestep.all_gather of equal values: every rank has whole "
        view.note(f"{text}batches, so a sum over ranks counts each value {view.ranks.size} times")
    return values


def _are_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, torch.Tensor):
        kinds = {(one.dtype, one.shape) for one in values}
        return len(kinds) == 1 and all(torch.equal(first, one) for one in values)
    is_number = type(first) in (int, float) and first != 0  # sums of zeros are right
    return is_number and values.count(first) == len(values)
