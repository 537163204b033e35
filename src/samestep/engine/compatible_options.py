"""Options of a step that exclude each other, or that a strategy does not support."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.config import StepConfig
from samestep.distributed.devices import device_kind, is_accelerator
from samestep.distributed.world import World
from samestep.engine.step_runner import StepRunner
from samestep.engine.sync_batch_norm_runner import SyncBatchNormRunner
from samestep.errors import InputError
from samestep.strategies.device_map import require_sync_batch_norm_devices


def require_compatible(config: StepConfig, world: World, model: torch.nn.Module, *, sync_batch_norm: bool) -> None:
    """Refuse options of a step that the strategy does not support.

    Raises:
        InputError: there is such an option.
    """
    option = "compile" if config.compile else "recompute"
    transforms, is_dp = config.compile or config.recompute, world.strategy.name == "dp"
    if sync_batch_norm and world.mesh_shape.splits_model:
        raise _incompatible(
            f"step.batch_norm: sync with the mesh {world.mesh_shape.name}",
            "batch norm over all microbatches runs replicas of the whole model",
            "set step.batch_norm: microbatch, or --strategy ddp",
        )
    if is_dp and sync_batch_norm:
        raise _incompatible(
            "strategy dp with batch_norm: sync",
            "under dp each norm layer uses the microbatch of its replica, as in nn.DataParallel",
            "--strategy ddp, or set batch_norm: microbatch",
        )
    if is_dp and transforms:
        raise _incompatible(
            f"strategy dp with step.{option}",
            "dp computes on replicas of the model, which excludes compiled and recomputed modules",
            f"--strategy ddp, or remove step.{option}",
        )
    if config.tensor_slices > 1 and (is_dp or sync_batch_norm):
        raise _slices_of_replicas(config.tensor_slices, is_dp=is_dp)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    if transforms and config.batch_norm == "sync" and has_batch_norm:
        raise _incompatible(
            f"step.{option} with step.batch_norm: sync",
            "batch norm over all microbatches runs copies of the model in lockstep, which excludes compiled "
            "and recomputed modules",
            f"set step.batch_norm: microbatch, or remove step.{option}",
        )
    if config.gather == "global" and (is_dp or world.mesh_shape.pipeline > 1):
        raise _incompatible(
            f"step.gather: global with {'strategy dp' if is_dp else f'the mesh {world.mesh_shape.name}'}",
            "one process per device, and outputs of all microbatches before the first backward",
            "--strategy ddp or fsdp, or set step.gather: microbatch",
        )
    if world.mesh_shape.pipeline > 1 and config.compile:
        _require_compilable_stages(config, world)
    if sync_batch_norm and world.strategy.name == "device_map":
        require_sync_batch_norm_devices(world)


def require_witness_support(every: int, config: StepConfig, world: World, runner: StepRunner) -> None:
    """Refuse a witness if a rank cannot compute a microbatch of another one with the same bits; a collective.

    Raises:
        InputError: the options of the step exclude it, or `every` is less than 1.
        RankMismatchError: ranks have other devices or intervals.
    """
    if every < 1:
        raise InputError(f"witness_every is {every}", "at least 1 step", "witness_every=100", code="E_VALUE")
    facts = {"witness_every": str(every), "kind of device": device_kind(world.device)}
    with world.context.collective_check.operation("making a witness", facts):
        pass
    is_deterministic = torch.are_deterministic_algorithms_enabled() or not is_accelerator(world.device)
    options = {
        f"the mesh {world.mesh_shape.name}": world.mesh_shape.splits_model,
        f"strategy {world.strategy.name}": world.strategy.name in ("dp", "device_map"),
        "step.batch_norm: sync": isinstance(runner, SyncBatchNormRunner),
        "step.gather: global": config.gather == "global",
        "step.reduction: fast on a GPU": not is_deterministic,
    }
    for option, is_set in options.items():
        if is_set:
            raise _incompatible(
                f"witness_every with {option}",
                "each rank can compute any microbatch without the others, with the same bits",
                "use --strategy ddp and the defaults of these options, or leave out witness_every",
            )


def _require_compilable_stages(config: StepConfig, world: World) -> None:
    if world.strategy.schedule == "zero_bubble":
        raise _incompatible(
            "step.compile with strategy.schedule: zero_bubble",
            "zero_bubble splits the backward in two halves, and a compiled module has one backward",
            "set strategy.schedule: 1f1b, or remove step.compile",
        )
    if config.reduction == "exact":
        raise _incompatible(
            f"step.compile with the mesh {world.mesh_shape.name} and step.reduction: exact",
            "the compiler rounds differently if it compiles modules and not the whole model, as in one process",
            "set step.reduction: fast, or remove step.compile",
        )


def _slices_of_replicas(slices: int, *, is_dp: bool) -> InputError:
    return _incompatible(
        f"step.tensor_slices: {slices} with {'strategy dp' if is_dp else 'step.batch_norm: sync'}",
        "slices are computed in the model itself, not in replicas of it",
        f"remove step.tensor_slices, or {'--strategy ddp' if is_dp else 'set step.batch_norm: microbatch'}",
    )


def _incompatible(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_INCOMPATIBLE")
