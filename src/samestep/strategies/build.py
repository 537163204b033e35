"""Construction of strategies: devices of the model, its division among ranks, reduction and strategy."""

from __future__ import annotations

import torch

from samestep.config import Reduction as ReductionName
from samestep.config import StepConfig
from samestep.distributed.devices import is_accelerator
from samestep.distributed.world import World
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.device_map import DeviceMap, apply_device_map
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.fsdp import FsdpStrategy, shard_model
from samestep.strategies.local_parameters import LocalParameters
from samestep.strategies.pipeline.strategy import PipelineStrategy, StageParameters, split_into_stages
from samestep.strategies.strategy import DeferredStrategy, SingleStrategy, Strategy, broadcast_model
from samestep.strategies.tensor_parallel import slice_model


def move_to_devices(model: torch.nn.Module, world: World) -> DeviceMap | None:
    """Move a model to the device of this rank, or its modules to several; return the device map in that case.

    Raises:
        InputError: the strategy does not fit the model, or a device is missing.
    """
    if world.strategy.name == "device_map":
        return apply_device_map(model, world)
    if world.mesh_shape.shard == 1:  # FSDP moves each shard itself
        model.to(world.device)
    return None


def divide_model(model: torch.nn.Module, world: World, config: StepConfig) -> LocalParameters:
    """Divide a model among ranks according to the layout, in place: tensor axis, shard axis, pipeline axis.

    Raises:
        InputError: the layout does not fit the model.
    """
    if world.mesh_shape.splits_model and not world.strategy.meta:
        broadcast_model(model, world)
    column_slices = slice_model(model, world, config)
    if world.mesh_shape.shard > 1:
        shard_model(model, world, is_exact=config.reduction == "exact")
    if world.mesh_shape.pipeline > 1:
        return split_into_stages(model, world, column_slices)
    return LocalParameters(model, world, column_slices)


def build_strategy(
    model: torch.nn.Module,
    local_parameters: LocalParameters,
    reduction: ReductionName,
    world: World,
) -> Strategy:
    """Return the strategy for the layout of a world, after `divide_model`."""
    if isinstance(local_parameters, StageParameters):
        return PipelineStrategy(model, local_parameters, reduction, world)
    parameters = list(local_parameters.names)
    sums = build_reduction(reduction, world.data, parameters, world.strategy.hook)
    if world.mesh_shape.shard > 1:
        return FsdpStrategy(model, local_parameters, sums, world)
    is_divided = world.mesh_shape.tensor > 1 or world.strategy.name == "device_map"
    if world.size > 1 and (is_divided or _is_refused_by_ddp(model, world)):
        return DeferredStrategy(model, local_parameters, sums, world)
    if world.size == 1:
        return SingleStrategy(world.mesh_shape.name, model, sums)
    return DdpStrategy(model, parameters, sums, world)


def _is_refused_by_ddp(model: torch.nn.Module, world: World) -> bool:
    """Return whether the model has layers that DDP refuses, although the engine replaces their forward."""
    has_layers = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    return has_layers and not is_accelerator(world.device)
