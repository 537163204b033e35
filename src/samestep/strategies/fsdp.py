"""Fully sharded data parallel: torch's FSDP2, over all ranks (`fsdp`) or within groups of ranks (`hsdp`).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020);
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, filterfalse

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StrategyConfig
from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.strategies.divided_parameters import is_divided
from samestep.strategies.tensor_division import Division

_MAX_UNITS = 200  # each unit is one message in forward and one in backward


def shard_model(model: nn.Module, world: World) -> None:
    """Shard the parameters of `model` among the ranks of the shard axis, in place.

    Parameters that FSDP cannot divide, which are scalars and those that are not contiguous, stay
    complete.
    """
    config = world.strategy
    mesh = world.mesh
    assert mesh is not None
    if any(nn.parameter.is_lazy(one) for one in model.parameters()):
        raise InputError(
            f"strategy {config.name!r} with a {type(model).__name__} whose parameters have no shapes yet",
            expected="parameters with shapes, which can be divided",
            fix="call the model once with a batch before samestep.parallel, or use strategy='ddp'",
            code="E_INCOMPATIBLE",
        )
    axes = mesh["replicate", "shard"] if world.mesh_shape.replicate > 1 else mesh["shard"]
    values = _move_to_meta(model, world) if config.meta else {}
    ignored = set(filterfalse(_is_divisible, model.parameters()))
    # Without a GPU, pinned memory cannot be allocated.
    offload = (
        CPUOffloadPolicy(pin_memory=is_accelerator(world.device))
        if config.offload
        else OffloadPolicy()
    )
    for module, precision in _with_precision([*shard_units(model), model], config):
        fully_shard(
            module, mesh=axes, mp_policy=precision, offload_policy=offload, ignored_params=ignored
        )
    if config.meta:
        device = torch.device("cpu") if config.offload else world.device
        model.to_empty(device=device)
        _move_buffers(model, world.device)
        _materialize(model, values, world)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are those of the whole batch, and gloo has no reduction that divides.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def shard_remainder(model: nn.Module, world: World) -> None:
    """Shard the parameters of a model of which parts are sharded already, without units."""
    assert world.mesh is not None
    axes = world.mesh["shard"]
    placements: list[Placement] = [Shard(0)]
    if world.mesh_shape.replicate > 1:
        axes = world.mesh["replicate", "shard"]
        placements = [Replicate(), Shard(0)]
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None and not is_divided(one) and _is_divisible(one):
                divided = distribute_tensor(one.detach(), axes, placements, src_data_rank=None)
                module._parameters[name] = nn.Parameter(divided, requires_grad=one.requires_grad)


def _is_divisible(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 0 and parameter.is_contiguous()


def _move_to_meta(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Move a model to the meta device and return its values by name on rank 0, none on other ranks."""
    named = list(model.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) < len(named):
        raise InputError(
            "strategy.meta with a model that uses a parameter under two names",
            expected="every parameter has one name: values are broadcast by name",
            fix="remove strategy.meta",
            code="E_STRATEGY",
        )
    values = (
        {name: tensor.detach() for name, tensor in _named_tensors(model)} if world.is_main else {}
    )
    if any(tensor.is_meta for tensor in values.values()):
        raise InputError(
            "the model has no values on rank 0",
            expected="strategy.meta: rank 0 builds the model with values, other ranks on the meta device",
            fix="with torch.device('meta') if world.rank else nullcontext(): model = ...",
            code="E_STRATEGY",
        )
    model.to("meta")
    return values


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to the device that computes, where FSDP expects them with `offload` too."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _materialize(model: nn.Module, values: Mapping[str, torch.Tensor], world: World) -> None:
    """Fill a sharded model with the values of rank 0, one tensor at a time: no device ever holds the complete model."""
    for name, tensor in _named_tensors(model):
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            full.copy_(values[name])
        world.broadcast(full)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(Division.of(tensor).local_part(full))
            else:
                tensor.copy_(full)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters that are gathered together and released after use.

    These are the elements of module lists (blocks of a transformer), or the children of a model
    without lists. Small modules, and parameters that several units use, belong to the root and are
    gathered once per forward.
    """
    lists = [
        module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    elements = dict.fromkeys(element for elements in lists for element in elements)
    nested = {child for element in elements for child in element.modules() if child is not element}
    units = [element for element in elements if element not in nested] or list(model.children())
    units = [
        module for module in units if not isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]  # never called
    users = Counter(parameter for module in units for parameter in set(module.parameters()))
    min_size = sum(parameter.numel() for parameter in model.parameters()) / _MAX_UNITS
    return [
        module
        for module in units
        if sum(p.numel() for p in module.parameters()) > min_size
        and all(users[p] == 1 for p in module.parameters())
    ]


def _with_precision(
    modules: Sequence[nn.Module], config: StrategyConfig
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Iterate over modules, innermost first and the model last, with their policies; reductions are in float32."""
    full = torch.float32
    half = torch.bfloat16
    if config.gather == "fp32":
        yield from ((module, MixedPrecisionPolicy()) for module in modules)
        return
    norms = [
        norm
        for norm in modules[-1].modules()
        if isinstance(norm, _BatchNorm) and list(norm.parameters())
    ]
    # Running statistics are float32, and torch's batch norm requires one dtype for all arguments.
    yield from ((norm, MixedPrecisionPolicy(full, full, output_dtype=half)) for norm in norms)
    yield from (
        (module, MixedPrecisionPolicy(half, full)) for module in modules[:-1] if module not in norms
    )
    yield modules[-1], MixedPrecisionPolicy(half, full, output_dtype=full)
