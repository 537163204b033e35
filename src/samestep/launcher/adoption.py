"""Use of a process group that another library has created in this process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from samestep.config import DeviceKind, StrategyConfig, resolve_mesh
from samestep.distributed.devices import (
    ACCELERATOR,
    accelerator_module,
    first_gpu_index,
    gpu_uuids,
    is_accelerator,
    require_default_device,
    require_own_gpus,
    share_gpus_by_nccl,
)
from samestep.distributed.env import Sharing, prepare_torch_environment, read_rendezvous
from samestep.distributed.logging import configure_logging
from samestep.errors import InputError
from samestep.launcher.job import TIMEOUT, Membership, process_state

_CPU = torch.device("cpu")


def adopt_process_group(
    kind: DeviceKind, timeout: timedelta | None, strategy: StrategyConfig, sharing: Sharing | None
) -> Membership:
    """Return the place of this rank in the default process group; collective.

    A group for one kind of device, such as NCCL's, gets a second one beside it for both kinds.

    Raises:
        InputError: ranks share a GPU, or the strategy needs groups for parts of the ranks, which
            the group's backend cannot provide.
    """
    require_default_device()
    prepare_torch_environment(loopback=False)  # the library has chosen the network interface
    rank = dist.get_rank()
    size = dist.get_world_size()
    limit = timeout or TIMEOUT
    configure_logging(rank)
    process_state.worlds += 1  # equal on all ranks
    store = dist.PrefixStore(f"samestep/world-{process_state.worlds}", _get_default_store())
    device = _device(kind)
    backend = _backend(device) or sharing or "nccl"
    if is_accelerator(device):
        accelerator_module().set_device(device)
        if sharing == "nccl":
            share_gpus_by_nccl(rank, loopback=False)
        if backend != "gloo" and sharing is None:
            require_own_gpus(store, rank, size, gpu_uuids(device, 1))
    if {_CPU.type, device.type} <= _device_types():
        return Membership(rank, size, device, store, limit, is_adopted=True)
    if resolve_mesh(strategy, size).splits_model:
        raise InputError(
            f"the mesh {resolve_mesh(strategy, size).name} in a process group for {', '.join(sorted(_device_types()))}",
            expected=f"a group for the CPU and {device.type}: groups for parts of the ranks have the same backends",
            fix=f'init_process_group("cpu:gloo,{ACCELERATOR}:nccl"), or a strategy that replicates the model',
            code="E_LAUNCH",
        )
    backends = "gloo" if device == _CPU else f"cpu:gloo,{device.type}:{backend}"
    group = dist.new_group(backend=backends, timeout=limit)
    return Membership(rank, size, device, store, limit, group=group, is_adopted=True)


def _device(kind: DeviceKind) -> torch.device:
    """Return the device that the library chose: of a kind, or of the backend for `auto`."""
    accelerator = torch.device(ACCELERATOR)
    available = accelerator_module().device_count() if kind != "cpu" else 0
    has_backend = _backend(accelerator) not in (None, "gloo")
    if kind == "cpu" or (kind == "auto" and not (available and has_backend)):
        return _CPU
    first_gpu_index(0, 1, available)  # there is one
    assert dist.group.WORLD is not None
    bound = dist.group.WORLD.bound_device_id
    index: int = accelerator_module().current_device() if bound is None else bound.index
    if index == 0 and available > 1:  # nothing has been chosen, or the first device
        rendezvous = read_rendezvous()
        index = (
            rendezvous.local_rank
            if rendezvous is not None and rendezvous.local_rank < available
            else 0
        )
    return torch.device(ACCELERATOR, index)


def _device_types() -> set[str]:
    assert dist.group.WORLD is not None
    return {device.type for device in dist.group.WORLD._device_types}


def _backend(device: torch.device) -> str | None:
    """Return the name of the default group's backend for a device, or None."""
    assert dist.group.WORLD is not None
    if device.type in _device_types():
        return dist.group.WORLD._get_backend(device).name()
    return None
