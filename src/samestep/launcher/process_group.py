"""Process group of this rank: options, and the other ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from samestep.config import DeviceKind, Reduction, StrategyConfig
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import (
    ACCELERATOR,
    is_accelerator,
    require_default_device,
    select_first_device,
)
from samestep.distributed.disk_operations import disk_operations
from samestep.distributed.env import (
    Sharing,
    prepare_shared_nccl,
    prepare_torch_environment,
    read_environment,
    read_rank_place,
)
from samestep.distributed.launcher_variables import RankPlace
from samestep.distributed.logging import configure_logging
from samestep.distributed.resources import (
    keep_freed_memory,
    usable_processors,
    use_short_temporary_folder,
)
from samestep.distributed.status import RankStatus
from samestep.errors import InputError
from samestep.launcher.peer_watchdog import PeerWatchdog
from samestep.launcher.process_state import Job, process_state
from samestep.launcher.rendezvous import TIMEOUT, join_job, join_launch
from samestep.launcher.watchdog import COLLECTIVE_MARGIN_SECONDS, HANG_AFTER


@dataclass(frozen=True)
class SessionOptions:
    """Options of a world; see `samestep.init`."""

    device: DeviceKind = "auto"
    reduction: Reduction = "fast"
    timeout: timedelta | None = None
    strategy: StrategyConfig | None = None
    run: str | Path | None = None
    loggers: tuple[Any, ...] = ()  # `samestep.loggers.logger.Logger`s, or their names
    share_gpu: bool = False
    threads: int | None = None
    is_private: bool = False  # the script sees neither the group nor the launcher's variables
    sees_own_devices: bool = False  # the devices of other ranks are not visible

    @property
    def sharing(self) -> Sharing | None:
        """Backend of ranks that may share GPUs: gloo, as NCCL supports one rank per GPU."""
        requested: Sharing | None = "gloo" if self.share_gpu else None
        return read_environment().sharing or requested

    def require_compatible(self, later: SessionOptions) -> None:
        """Require that options of a later `samestep.init` are these, or defaults."""
        defaults = SessionOptions()
        for name in (field.name for field in fields(self)):
            value = getattr(later, name)
            own = getattr(self, name)
            is_compared = name not in ("is_private", "sees_own_devices")
            if is_compared and value not in (getattr(defaults, name), own):
                wanted = _shown(value)
                raise InputError(
                    f"samestep.init({name}={wanted}) in a process that has joined with "
                    f"{name}={_shown(own)}",
                    expected="the options of the first call, which samestep.parallel makes if the "
                    "script does not",
                    fix=f"call samestep.init({name}={wanted}) once, before samestep.parallel",
                    code="E_LAUNCH",
                )


def _shown(value: Any) -> str:
    """Return an option as a script writes it; of a strategy, only the keys that it has set."""
    if not isinstance(value, StrategyConfig):
        return repr(value)
    default = StrategyConfig()
    keys = {key.name: getattr(value, key.name) for key in fields(value)}
    texts = [f"{key}={own!r}" for key, own in keys.items() if own != getattr(default, key)]
    return f"StrategyConfig({', '.join(texts)})"


class Membership(NamedTuple):
    """Place of this rank among the ranks of a world, and the means to reach them."""

    rank: int
    size: int
    device: torch.device
    limit: timedelta  # of collectives
    rank_place: RankPlace | None = None  # of another launcher
    watchdog: PeerWatchdog | None = None  # of ranks that another launcher started
    group: dist.ProcessGroup | None = None  # None for the default group


def create_process_group(options: SessionOptions, rank_status: RankStatus) -> Membership:
    """Select the device, find the other ranks and create the default process group.

    Raises:
        InputError: the process has a group, or options, devices and ranks do not fit.
    """
    if dist.is_initialized() or process_state.world is not None:
        raise InputError(
            "this process already has a process group",
            expected="one samestep.init() at a time, without init_process_group",
            fix="pass the existing world to the code that needs one",
            code="E_LAUNCH",
        )
    require_default_device()
    rank_place = other_launcher()
    is_local = rank_place is None or rank_place.is_on_one_machine
    prepare_torch_environment(loopback=is_local, deterministic=options.reduction == "exact")
    rank, size, local_rank = rank_numbers(rank_place)
    configure_logging(rank)
    sharing = options.sharing
    device = select_first_device(
        options.device,
        options.strategy or StrategyConfig(),
        size,
        local_rank,
        sharing=sharing,
        sees_own=options.sees_own_devices,
        can_see_own=rank_place is not None and rank_place.launcher != "torchrun",
    )
    disk_operations.rank_status = rank_status
    device_reads.rank_status = rank_status
    if size > 1 or not options.is_private:
        keep_freed_memory()  # before the threads of the process group exist
        use_short_temporary_folder()
    backend = "gloo"
    if is_accelerator(device):
        backend = f"cpu:gloo,{ACCELERATOR}:{sharing or 'nccl'}"
        if sharing == "nccl":
            prepare_shared_nccl(rank, loopback=is_local)
    with rank_status.operation("samestep.init()"), rank_status.waiting("the rendezvous"):
        store, job, hang_after = _find_ranks(rank_place, options.timeout)
        limit = timedelta(seconds=hang_after)
        if job is not None:  # the watchdog reports a hang first
            limit += timedelta(seconds=COLLECTIVE_MARGIN_SECONDS)
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        if options.is_private:
            sys.excepthook = hook  # without torch's prefix of the rank
    watchdog = None
    if job is not None and size > 1:
        watchdog = PeerWatchdog(job, store, rank_status, hang_after)
    return Membership(rank, size, device, limit, rank_place, watchdog)


def _find_ranks(
    rank_place: RankPlace | None, timeout: timedelta | None
) -> tuple[dist.Store, Job | None, float]:
    """Wait for the other ranks; return the store of this world, the job, and the limit of hangs."""
    worker = process_state.worker
    job = None
    hang_after = HANG_AFTER
    if worker is not None:
        store = join_launch(worker, timeout or TIMEOUT)
        hang_after = worker.timeout
    elif rank_place is not None:
        job = join_job(rank_place, timeout or TIMEOUT)
        store = job.store
        hang_after = job.hang_after
    else:
        store = dist.HashStore()
    if worker is not None or job is not None:
        # Equal on all ranks, which enter worlds in the same order.
        process_state.worlds += 1
        store = dist.PrefixStore(f"world-{process_state.worlds}", store)
    if timeout is not None:
        hang_after = timeout.total_seconds()
    return store, job, hang_after


def other_launcher() -> RankPlace | None:
    """Return the place of this rank under a launcher other than Samestep's, or None."""
    if process_state.worker is not None:
        return None
    return read_rank_place() or process_state.rank_place


def rank_numbers(rank_place: RankPlace | None) -> tuple[int, int, int]:
    """Return rank, number of ranks and local rank of this process."""
    if process_state.worker is not None:
        rank = process_state.worker.rank
        return rank, process_state.worker.size, rank
    if rank_place is not None:
        return (rank_place.rank, rank_place.world_size, rank_place.local_rank)
    return (0, 1, 0)


def set_threads(options: SessionOptions, own: Membership) -> None:
    """Set the number of intra-op threads of this rank."""
    threads = options.threads
    if threads is None and options.reduction == "exact":
        threads = 1  # another number has other bits
    elif threads is None and own.size > 1 and not is_accelerator(own.device):
        local_size = None
        if own.rank_place is not None:
            local_size = own.rank_place.local_size
        share = usable_processors() // (local_size or own.size)
        threads = max(1, min(torch.get_num_threads(), share))
    if threads is not None:
        torch.set_num_threads(threads)
    # MKL selects the kernels of its vector functions at their first call. If several threads make
    # this call at the same time, one of them can compute with a generic kernel, with other
    # rounding.
    torch.tanh(torch.zeros(16))
