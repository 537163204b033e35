"""`samestep.init()`: rendezvous, device, process group, determinism and teardown of one rank.

Decisions: docs/decisions/package.md
"""

from __future__ import annotations

import atexit
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from samestep.config import DeviceKind, Reduction, StrategyConfig, resolve_mesh
from samestep.config.exclusions import require_compatible
from samestep.distributed.collective_check import CollectiveCheck
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import (
    ACCELERATOR,
    accelerator_module,
    deterministic_kernels,
    device_clock,
    first_gpu_index,
    gpu_uuids,
    is_accelerator,
    require_default_device,
    require_own_gpus,
    share_gpus_by_nccl,
)
from samestep.distributed.disk_operations import disk_operations
from samestep.distributed.env import (
    Sharing,
    hide_ranks,
    prepare_torch_environment,
    read_environment,
    read_rendezvous,
)
from samestep.distributed.launcher_detection import Rendezvous
from samestep.distributed.logging import configure_logging
from samestep.distributed.private_group import destroy, hide_default_group
from samestep.distributed.rendezvous import wait_for_ranks
from samestep.distributed.resources import keep_freed_memory, usable_processors
from samestep.distributed.rng import passed_generators
from samestep.distributed.signals import STOP_SIGNALS, StoppedLoop, StopRequest
from samestep.distributed.status import RankStatus, local_rank_status
from samestep.distributed.world import RunContext, World, build_world
from samestep.errors import EXIT_FAILED, InputError
from samestep.launcher.adoption import adopt_process_group
from samestep.launcher.job import TIMEOUT, Job, Membership, host_store, join_job, process_state
from samestep.launcher.peer_watchdog import PeerWatchdog
from samestep.launcher.preflight import use_short_temporary_folder
from samestep.launcher.uncaught import UncaughtErrors, joined_job
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER
from samestep.launcher.worker import end_loader_workers, exit_process
from samestep.launcher.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from samestep.loggers.logger import Logger

_RELEASE_SECONDS = 0.01


@contextmanager
def start(
    *,
    device: DeviceKind = "auto",
    reduction: Reduction = "exact",
    threads: int = 1,
    timeout: timedelta | None = None,
    strategy: StrategyConfig | None = None,
    run: str | Path | None = None,
    loggers: Sequence[Logger | str] = (),
    share_gpu: bool = False,
    adopt: bool = False,
) -> Iterator[World]:
    """Join the other ranks, and yield the world.

    Arguments are those of `init`; `exact` and one thread are the defaults, and torch's default
    group is not private.

    Yields:
        The world. Its process group ends with the block, unless it was adopted.

    Raises:
        InputError: as `init`.
    """
    options = SessionOptions(
        device, reduction, timeout, strategy, run, tuple(loggers), share_gpu, adopt, threads
    )
    with _session(options) as world:
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
    adopt: bool = False,
) -> World:
    """Join the other ranks, and return the world.

    Ranks are defined by `samestep.launch` or the `samestep` command, otherwise by the environment
    variables of torchrun, Slurm's srun or Open MPI's mpirun (docs/guides/launching.md), otherwise
    this process is the only rank.

    The world ends when the interpreter exits, when the function of `samestep.launch` returns, or at
    the end of a
    block: `with samestep.init():`. A second call returns the same world. `samestep.parallel` calls
        this function.

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
            the limit of the
            launcher, with a slightly longer one of collectives: the watchdog reports a hang first.
        strategy: a strategy that divides the model needs torch's default group, which is then not
            private.
        run: name of a run in `runs`, or a `Path` of its directory; None writes nothing. An existing
            run is continued.
        loggers: loggers of `World.log`, used on rank 0 and closed at the end of the world. With a
            run, they receive its events too; also `tensorboard`, `wandb` and `mlflow` by name.
        share_gpu: several ranks may use one GPU; they communicate by gloo in place of NCCL.
        adopt: use the process group of another library in this process, if there is one, with its
            ranks and device; the group stays afterwards. Ranks are not watched for hangs.

    Raises:
        InputError: device, default device or mesh do not fit, a process group exists, the run
            cannot be written, or the process has a world with other options.
    """
    options = SessionOptions(
        device, reduction, timeout, strategy, run, tuple(loggers), share_gpu, adopt, threads
    )
    return join(replace(options, is_private=not adopt and not _needs_default_group(strategy)))


def join(options: SessionOptions) -> World:
    """Join the other ranks as `init` does, and return the world."""
    if process_state.world is not None:
        _require_same(options)
        return process_state.world
    session = process_state.session
    world = session.enter_context(_session(options))
    if not options.adopt:
        _share_generators(world)
    world = replace(world, context=replace(world.context, session=session))
    process_state.world = world
    process_state.options = options
    session.callback(_forget_world)
    uncaught = UncaughtErrors(None if options.adopt else joined_job(), world.context.status)
    session.push(uncaught.close)
    atexit.register(_end_script, world, uncaught, is_adopted=options.adopt)
    return world


@dataclass(frozen=True)
class SessionOptions:
    """Options of a world; see `start`."""

    device: DeviceKind = "auto"
    reduction: Reduction = "fast"
    timeout: timedelta | None = None
    strategy: StrategyConfig | None = None
    run: str | Path | None = None
    loggers: tuple[Logger | str, ...] = ()
    share_gpu: bool = False
    adopt: bool = False
    threads: int | None = None  # None: as the script has it, or a share of the cores
    is_private: bool = False  # the script sees neither the group nor the launcher's variables
    sees_own_devices: bool = False  # the devices of other ranks are not visible


def _require_same(options: SessionOptions) -> None:
    """Require that options of a second `init` are those of the first, or defaults."""
    first = process_state.options
    defaults = SessionOptions()
    for name in (field.name for field in fields(SessionOptions)):
        value = getattr(options, name)
        before = getattr(first, name)
        if name not in ("is_private", "sees_own_devices") and value not in (
            getattr(defaults, name),
            before,
        ):
            wanted = _shown(value)
            raise InputError(
                f"samestep.init({name}={wanted}) in a process that has joined with {name}={_shown(before)}",
                expected="the options of the first call, which samestep.parallel makes if the script does not",
                fix=f"call samestep.init({name}={wanted}) once, before samestep.parallel",
                code="E_LAUNCH",
            )


def _shown(value: Any) -> str:
    """Return an option as a script writes it; of a strategy, only the keys that it has set."""
    if not isinstance(value, StrategyConfig):
        return repr(value)
    default = StrategyConfig()
    keys = {key.name: getattr(value, key.name) for key in fields(value)}
    return f"StrategyConfig({', '.join(f'{key}={one!r}' for key, one in keys.items() if one != getattr(default, key))})"


def _needs_default_group(strategy: StrategyConfig | None) -> bool:
    return strategy is not None and (
        strategy.name not in ("auto", "ddp") or strategy.ranks_per_model > 1
    )


def _forget_world() -> None:
    process_state.world = process_state.options = None


@contextmanager
def _session(options: SessionOptions) -> Iterator[World]:
    """Join the other ranks, and yield the world."""
    worker = process_state.worker
    strategy = options.strategy or StrategyConfig()
    status = worker.rank_status if worker else local_rank_status()
    status.is_free = options.is_private
    if options.adopt and dist.is_initialized():
        own = adopt_process_group(options.device, options.timeout, strategy, _sharing(options))
    else:
        own = _create_process_group(worker, options, status)
    _set_threads(options, own)
    check = CollectiveCheck(own.store, status, rank=own.rank, size=own.size, timeout=own.limit)
    status.device_clock = device_clock(own.device) if own.size > 1 else None
    stop = StopRequest() if options.is_private else _stop_request(worker)
    context = RunContext(status, stop, check)
    if options.reduction == "exact":
        context.resources.enter_context(deterministic_kernels())
    try:
        world = replace(
            build_world(own.rank, own.size, own.device, context, strategy, own.limit),
            group=own.group,
        )
        if options.is_private:
            own = own._replace(group=hide_default_group())
            process_state.rendezvous = own.rendezvous  # of later worlds too
            hide_ranks()
            world = replace(world, group=own.group, is_private=True)
        with context.resources as resources:
            world = resources.enter_context(_with_loggers(world, options.run, options.loggers))
            for observer in process_state.on_world:
                observer(world)
            signals: AbstractContextManager[None] = nullcontext()
            if own.rendezvous is not None and not options.is_private:
                signals = stopped_by_signals(stop, keeps_handlers=False)
            with check.until_end(), signals:
                yield world
    except StoppedLoop:  # on all ranks after the same step
        _leave(world, own, is_launched=worker is not None)
        raise
    except BaseException:
        _leave_after_failure(own)
        raise
    _leave(world, own, is_launched=worker is not None)


def _share_generators(world: World) -> None:
    """Give the states of rank 0's generators to all ranks: a script without seeds draws equal numbers on all."""
    if world.size > 1:
        for generator in passed_generators(world.device):
            state = generator.state()
            world.broadcast(state)
            if not world.is_main:
                generator.set_state(state)


def _end_script(world: World, uncaught: UncaughtErrors, *, is_adopted: bool) -> None:
    """End the session at the exit of the interpreter: an error would not change the exit code by itself."""
    uncaught.limit_exit()
    try:
        _end_session(world, is_adopted=is_adopted)
    except Exception as error:  # boundary: nothing is above
        uncaught.report(error)
        exit_process(EXIT_FAILED)


def _end_session(world: World, *, is_adopted: bool) -> None:
    # After an uncaught exception, other ranks may wait in a collective for this one, and the
    # teardown for them.
    error: BaseException | None = getattr(sys, "last_value", None)
    # The library that owns an adopted group may have destroyed it.
    stack = (
        process_state.session
        if not is_adopted or dist.is_initialized()
        else world.context.resources
    )
    stack.__exit__(type(error) if error is not None else None, error, None)


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
    own = (
        tuple(logger for logger in loggers if not isinstance(logger, str)) if world.is_main else ()
    )
    with ExitStack() as stack:
        for logger in own:
            stack.callback(logger.close)
        used = (
            () if process_state.is_experiment else own
        )  # values of a trial do not belong into the user's tracker
        yield replace(world, context=replace(world.context, loggers=used))


def _create_process_group(
    worker: WorkerSpec | None, options: SessionOptions, rank_status: RankStatus
) -> Membership:
    """Select the device, find the other ranks and create the process group."""
    if dist.is_initialized() or process_state.world is not None:
        raise InputError(
            "this process already has a process group",
            expected="one samestep.init() at a time, without init_process_group",
            fix="pass the existing world to the code that needs one, or adopt=True for the group of another library",
            code="E_LAUNCH",
        )
    require_default_device()
    rendezvous = (read_rendezvous() or process_state.rendezvous) if worker is None else None
    is_local = rendezvous is None or rendezvous.is_on_one_machine
    timeout = options.timeout
    prepare_torch_environment(loopback=is_local, deterministic=options.reduction == "exact")
    rank, size, _ = _ranks(worker, rendezvous)
    configure_logging(rank)
    sharing = _sharing(options)
    device, own_gpus = _select_devices(options, worker, rendezvous, sharing)
    disk_operations.rank_status = rank_status
    device_reads.rank_status = rank_status
    if size > 1 or not options.is_private:
        keep_freed_memory()  # before the threads of the process group exist
        use_short_temporary_folder()
    backend = "gloo"
    if is_accelerator(device):
        backend = f"cpu:gloo,{ACCELERATOR}:{sharing or 'nccl'}"
        if sharing == "nccl":
            share_gpus_by_nccl(rank, loopback=is_local)
    with rank_status.operation("samestep.init()"), rank_status.waiting("the rendezvous"):
        job = join_job(rendezvous, timeout or TIMEOUT) if rendezvous else None
        store = _world_store(worker, job, timeout or TIMEOUT)
        if own_gpus and size > 1:
            require_own_gpus(store, rank, size, own_gpus)
        default = worker.timeout if worker else job.hang_after if job else HANG_AFTER
        hang_after = timeout.total_seconds() if timeout is not None else default
        limit = timedelta(
            seconds=hang_after + (COLLECTIVE_MARGIN_SECONDS if job is not None else 0)
        )
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        if options.is_private:
            sys.excepthook = hook  # without torch's prefix of the rank
    watchdog = (
        PeerWatchdog(job, store, rank_status, hang_after) if job is not None and size > 1 else None
    )
    return Membership(rank, size, device, store, limit, rendezvous, watchdog)


def _sharing(options: SessionOptions) -> Sharing | None:
    """Return the backend of ranks that may share GPUs: by default gloo, as NCCL supports one rank per GPU."""
    requested: Sharing | None = "gloo" if options.share_gpu else None
    return read_environment().sharing or requested


def _leave(world: World, own: Membership, *, is_launched: bool) -> None:
    # Ranks leave together: a rank that destroys its group while another communicates can abort at
    # exit.
    world.barrier()
    if own.watchdog is not None:
        own.watchdog.close()
        world.barrier()  # otherwise a watchdog could find the store gone
    world.context.status.finish()
    if own.is_adopted:
        # The owner may exit now. Threads of gloo that still release the barrier's objects would
        # abort the process.
        time.sleep(_RELEASE_SECONDS)
        return
    if is_launched:
        process_state.finished_groups.append(own.group or dist.group.WORLD)
    destroy(own.group)


def _leave_after_failure(own: Membership) -> None:
    if own.watchdog is not None:
        own.watchdog.join_if_ending()
    # With other ranks the group stays: they may wait in a collective for this rank, and the
    # teardown for them.
    if own.size == 1 and not own.is_adopted:
        destroy(own.group)


def _stop_request(worker: WorkerSpec | None) -> StopRequest:
    if worker is None:
        return StopRequest()
    worker.stop.install()  # not earlier: SIGTERM must end a script that never calls start()
    return worker.stop


def stopped_by_signals(stop: StopRequest, *, keeps_handlers: bool) -> AbstractContextManager[None]:
    """Take stop signals and the first Ctrl-C inside a block as stop requests. Does nothing outside the main thread.

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
        atexit.unregister(end_loader_workers)
        atexit.register(end_loader_workers)
    return stop.handling(numbers)


def _ranks(worker: WorkerSpec | None, rendezvous: Rendezvous | None) -> tuple[int, int, int]:
    """Return rank, number of ranks and local rank."""
    if worker is not None:
        return worker.rank, worker.size, worker.rank
    if rendezvous is not None:
        return (rendezvous.rank, rendezvous.world_size, rendezvous.local_rank)
    return (0, 1, 0)


def _select_devices(
    options: SessionOptions,
    worker: WorkerSpec | None,
    rendezvous: Rendezvous | None,
    sharing: Sharing | None,
) -> tuple[torch.device, list[str]]:
    """Return the first device of this rank, and the UUIDs of GPUs that it must share with no other rank."""
    kind = options.device
    strategy = options.strategy or StrategyConfig()
    available = accelerator_module().device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and available == 0):
        return torch.device("cpu"), []
    _, size, local_rank = _ranks(worker, rendezvous)
    per_rank = (strategy.devices or 1) if strategy.name == "device_map" else 1
    # srun --gpus-per-task=1 and similar options hide the devices of other ranks, too.
    shows_own = (
        available == per_rank and rendezvous is not None and rendezvous.launcher != "torchrun"
    )
    if options.sees_own_devices or shows_own:
        local_rank = 0
    device = torch.device(
        ACCELERATOR, first_gpu_index(local_rank, per_rank, available, share=sharing is not None)
    )
    shape = resolve_mesh(strategy, size)
    require_compatible({"sharing": sharing, "pipeline": shape.pipeline})
    accelerator_module().set_device(device)
    own_gpus = gpu_uuids(device, per_rank) if sharing is None else []
    return device, own_gpus


def _set_threads(options: SessionOptions, own: Membership) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif options.reduction == "exact":
        torch.set_num_threads(1)  # another number has other bits
    elif own.size > 1 and not is_accelerator(own.device):
        share = usable_processors() // _local_size(own)
        torch.set_num_threads(max(1, min(torch.get_num_threads(), share)))
    # MKL selects the kernels of its vector functions at their first call. If several threads make
    # this call at the same time, one of them can compute with a generic kernel, with other
    # rounding.
    torch.tanh(torch.zeros(16))


def _local_size(own: Membership) -> int:
    """Return the number of ranks on this machine, or of all ranks if it is unknown."""
    return (own.rendezvous.local_size if own.rendezvous is not None else None) or own.size


def _world_store(worker: WorkerSpec | None, job: Job | None, timeout: timedelta) -> dist.Store:
    """Return the part of the job's store that belongs to this world alone."""
    if worker is not None:
        store = _launch_store(worker, timeout)
    elif job is not None:
        store = job.store
    else:
        return dist.HashStore()
    process_state.worlds += 1  # equal on all ranks, which enter worlds in the same order
    return dist.PrefixStore(f"world-{process_state.worlds}", store)


def _launch_store(worker: WorkerSpec, timeout: timedelta) -> dist.Store:
    if process_state.launch_store is None:
        host_store(worker, timeout)
        rank = worker.rank
        size = worker.size
        hint = "read the output of the missing ranks"
        store = process_state.hosted_store
        if store is None:
            store = dist.TCPStore(
                *worker.store_address, size, False, timeout, wait_for_workers=False
            )
        store = dist.PrefixStore(read_environment().job_prefix, store)
        process_state.launch_store, _ = wait_for_ranks(
            store, rank=rank, size=size, restarts=0, timeout=timeout, hint=hint
        )
    return process_state.launch_store
