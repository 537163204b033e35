"""Construction of an engine's components, in the order in which a model is prepared, divided and wrapped.

The steps: devices, transforms of the model (TF32, memory format, activation checkpointing and compilation), division
among ranks, reduction, strategy, runner.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from samestep.config import Reduction as ReductionName
from samestep.config import StepConfig
from samestep.config.validation import match_patterns
from samestep.distributed.devices import is_accelerator, set_tf32
from samestep.distributed.private_group import show
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.buffer_rules import Rule
from samestep.engine.buffers import AveragedBuffers, ForwardState
from samestep.engine.callbacks import Callback, Intervention, of_microbatches
from samestep.engine.compatible_options import require_compatible
from samestep.engine.consistency import ConsistencyCheck
from samestep.engine.cuda_graphs import with_graphs
from samestep.engine.data_parallel import DataParallelRunner
from samestep.engine.ema import AveragedWeights
from samestep.engine.evaluation import EvaluationOutputs
from samestep.engine.fast_merging import MergedRunner, why_separate
from samestep.engine.global_loss import GlobalLossRunner
from samestep.engine.loss import LossFunction, as_step_loss
from samestep.engine.microbatch_forward import MicrobatchForward
from samestep.engine.model_changes import ModelState
from samestep.engine.module_attributes import is_of_torch
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.pipeline_runner import PipelineOutputs, PipelineRunner
from samestep.engine.side_effects import OutsideState
from samestep.engine.step_runner import SequentialRunner, StepRunner
from samestep.engine.sync_batch_norm_runner import SyncBatchNormRunner
from samestep.errors import InputError
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.device_map import DeviceMap, apply_device_map
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.fsdp import FsdpStrategy, shard_model
from samestep.strategies.local_parameters import LocalParameters, closure_error, replace_optimizer_parameters
from samestep.strategies.pipeline.strategy import PipelineStrategy, StageParameters, split_into_stages
from samestep.strategies.strategy import (
    DeferredStrategy,
    SingleStrategy,
    Strategy,
    broadcast_model,
    require_plain_model,
)
from samestep.strategies.tensor_parallel import slice_model


class Components(NamedTuple):
    """Parts of an engine; `Engine` documents those that are its attributes too."""

    state: ModelState
    device_map: DeviceMap | None
    local_parameters: LocalParameters
    averaged: AveragedWeights | None
    runner: StepRunner
    outputs: EvaluationOutputs
    consistency: ConsistencyCheck


def build_components(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction | MultiLoss | None,
    world: World,
    config: StepConfig,
    check_every: int | None,
    ema: float | None,
    callbacks: Sequence[Callback],
    buffers: Mapping[str, Rule] | None = None,
    previous: Components | None = None,
) -> Components:
    """Prepare `model` and `optimizer` in place and return the engine's components.

    The order is fixed: checks on the plain model, devices, transforms, division among ranks, the optimizer's
    parameters, the strategy's wrapper, the runner. `previous` are the components before parameters of the model
    changed; the model then is transformed already.

    Raises:
        InputError: model, optimizer, configuration and strategy do not fit together.
    """
    sync_batch_norm = config.batch_norm == "sync" and uses_batch_statistics(model)
    if previous is not None:
        sync_batch_norm |= previous.state.sync_batch_norm
        previous.state.require_whole_model(world)
    require_compatible(config, world, model, sync_batch_norm=sync_batch_norm)
    require_plain_model(model, config)
    model_parameters = list(model.parameters())
    _require_optimizer_of([p for p in model_parameters if p.requires_grad], optimizer)
    if previous is not None:
        optimizer.zero_grad(set_to_none=True)  # a gradient may have another shape than the parameter has now
        previous.runner.strategy.close()

    device_map = move_to_devices(model, world, previous and previous.device_map)
    if previous is None:
        transform_model(model, config, world.device, device_map)
    local_parameters = divide_model(model, world, config)
    if isinstance(local_parameters, StageParameters):
        local_parameters.prepare(config)
    replace_optimizer_parameters(optimizer, model_parameters, local_parameters)
    averaged = _averaged_weights(local_parameters, ema, previous)
    consistency = _compare_ranks(
        model, optimizer, world, check_every, averaged, callbacks, is_whole=not local_parameters.is_divided
    )
    scaler = _scaler(config, world) if previous is None else previous.runner.scaler
    forward = _microbatch_forward(model, loss, config, world, callbacks)
    if world.is_private and world.group is not None:
        show(world.group)  # strategies and batch norm create groups beside a default one
    strategy = build_strategy(model, local_parameters, config.reduction, world)
    receiving = local_parameters.names if strategy.defers_gradients else local_parameters.module_names
    kind, reason = _runner_class(strategy, world, config, callbacks, sync_batch_norm=sync_batch_norm)
    kind, no_graphs, replays = with_graphs(kind, strategy, world, config, callbacks)
    outputs = _evaluation_outputs(model, forward, strategy, world)
    state = _build_buffers(model, buffers, kind, is_whole=not local_parameters.is_divided)
    runner = kind(model, forward, strategy, state, scaler, receiving, world, of_microbatches(callbacks))
    runner.separate_reason, runner.graphs_reason, runner.replays_graphs = reason, no_graphs, replays
    model_state = ModelState(model, optimizer, config, sync_batch_norm, is_divided=local_parameters.is_divided)
    return Components(model_state, device_map, local_parameters, averaged, runner, outputs, consistency)


def _microbatch_forward(
    model: torch.nn.Module,
    loss: LossFunction | MultiLoss | None,
    config: StepConfig,
    world: World,
    callbacks: Sequence[Callback],
) -> MicrobatchForward:
    forward = MicrobatchForward(as_step_loss(loss), config, world.device)
    if not any(isinstance(callback, Intervention) for callback in callbacks):  # `samestep verify` finds the cause
        forward.outside = OutsideState(model, loss)
    return forward


def _compare_ranks(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    check_every: int | None,
    averaged: AveragedWeights | None,
    callbacks: Sequence[Callback],
    *,
    is_whole: bool,
) -> ConsistencyCheck:
    """Compare the initial state of all ranks, and return the check for later; a collective."""
    consistency = ConsistencyCheck(model, optimizer, world, check_every, averaged, is_active=is_whole)
    consistency.compare(0)  # before a strategy broadcasts the model of rank 0
    if any(isinstance(callback, Intervention) for callback in callbacks):
        consistency.is_active = False  # `samestep verify` records the differences
    consistency.compare_at_end()
    return consistency


def _scaler(config: StepConfig, world: World) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
    if world.strategy.offload and world.mesh_shape.shard > 1:
        # The scale is created where it is used first: on the device of the gradients. From another device, torch would
        # copy it without a wait, and the host would read the copy before its end.
        scaler.scale(torch.zeros(()))
    return scaler


def _evaluation_outputs(
    model: torch.nn.Module, forward: MicrobatchForward, strategy: Strategy, world: World
) -> EvaluationOutputs:
    if isinstance(strategy, PipelineStrategy):
        return PipelineOutputs(model, forward, world, strategy.stages)
    return EvaluationOutputs(model, forward, world.data)


def _runner_class(
    strategy: Strategy, world: World, config: StepConfig, callbacks: Sequence[Callback], *, sync_batch_norm: bool
) -> tuple[type[StepRunner], str | None]:
    """Return the class of the runner, and the reason for which it computes no microbatches together, if it could."""
    merges = config.reduction == "fast" and config.merge == "auto"
    is_witnessed = any(callback.repeats_microbatches for callback in callbacks)
    reason = why_separate(config, world, strategy, sync_batch_norm=sync_batch_norm, is_witnessed=is_witnessed)
    kind: type[StepRunner] = MergedRunner if merges and reason is None else SequentialRunner
    if isinstance(strategy, PipelineStrategy):
        kind = PipelineRunner
    elif world.strategy.name == "dp":
        kind = DataParallelRunner
    elif sync_batch_norm:
        kind = SyncBatchNormRunner
    elif config.gather == "global":
        kind = GlobalLossRunner
    return kind, reason if merges else None


def _averaged_weights(
    local_parameters: LocalParameters, ema: float | None, previous: Components | None
) -> AveragedWeights | None:
    if previous is None or previous.averaged is None:
        return AveragedWeights(local_parameters.trained, ema) if ema is not None else None
    previous.averaged.follow(local_parameters.local)
    return previous.averaged


def _require_optimizer_of(parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds other parameters than the trained ones, whose gradients are reduced."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError(
            "the optimizer is SparseAdam, which needs sparse gradients",
            expected="an optimizer for dense gradients, which are summed over microbatches in a fixed order",
            fix="torch.optim.Adam, and layers without sparse=True",
            code="E_OPTIMIZER",
        )
    if not parameters:
        raise InputError(
            "no parameter of the model requires a gradient",
            expected="a model with parameters to train",
            fix="requires_grad_(True) for the parameters to train",
            code="E_OPTIMIZER",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise closure_error(optimizer)
    in_optimizer: set[Any] = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing, foreign = len(set(parameters) - in_optimizer), len(in_optimizer - set(parameters))
    if missing or foreign:
        raise InputError(
            f"{missing} trained parameters of the model are not in the optimizer, and {foreign} parameters of the "
            "optimizer are not in the model",
            expected="the optimizer holds exactly the model's parameters that require a gradient",
            fix="construct it from model.parameters(); freeze others with requires_grad_(False); for parameters that "
            "are new or no longer frozen, call optimizer.add_param_group, or make a new engine",
            code="E_OPTIMIZER",
        )


def _build_buffers(
    model: torch.nn.Module, rules: Mapping[str, Rule] | None, runner_class: type[StepRunner], *, is_whole: bool
) -> AveragedBuffers | ForwardState:
    """Return the rules for the state that a forward changes.

    Raises:
        InputError: the runner does not support the rules.
    """
    if runner_class is PipelineRunner:
        if rules:
            raise InputError(
                "buffers=... with a pipeline",
                "stages average their floating-point buffers and counters, and change no others",
                "use --strategy ddp, or remove buffers=...",
                code="E_INCOMPATIBLE",
            )
        return AveragedBuffers(model)
    state = ForwardState(model, rules, is_whole=is_whole)
    if state.declared_parameters and runner_class is not SequentialRunner:
        raise InputError(
            f"a rule for the parameter {state.declared_parameters[0]}",
            "under batch_norm: sync, gather: global and dp, microbatches computed together share the parameters",
            "write the parameter after engine.step, or remove these options",
            code="E_INCOMPATIBLE",
        )
    return state


def transform_model(
    model: torch.nn.Module, config: StepConfig, device: torch.device, device_map: DeviceMap | None = None
) -> None:
    """Set TF32, memory format, activation checkpointing and compilation, in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    set_tf32(device, allowed=config.tf32)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in _checkpointed_modules(model, config.recompute):
        module.forward = partial(_checkpointed_forward, module.forward, device_map)
    if config.compile:
        # Dropout draws the same numbers as without compilation. Kernels are compiled for one size each: the sizes seen
        # earlier on a rank must not select the kernel.
        torch._inductor.config.fallback_random = True
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # torch leaves frames of its own modules to the interpreter, so all of an `nn.Sequential`.
        with torch._dynamo.config.patch(wrap_top_frame=is_of_torch(model)):
            model.compile(dynamic=False)


def _checkpointed_forward(
    forward: Callable[..., Any], device_map: DeviceMap | None, /, *arguments: Any, **named: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    repeated = forward if device_map is None else device_map.repeatable(forward)
    count, names = len(arguments), tuple(named)

    def compute(*values: Any) -> Any:
        return repeated(*values[:count], **dict(zip(names, values[count:], strict=True)))

    # By position: torch restores the generators of the devices of these tensors, and has options of its own by name.
    return checkpoint(compute, *arguments, *named.values(), use_reentrant=False)


def _checkpointed_modules(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[torch.nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    names = match_patterns(modules, patterns, key="step.recompute", kind="module", example="blocks.*")
    # The outermost modules only: their children are recomputed with them.
    return [modules[name] for name in names if not any(name.startswith(f"{other}.") for other in names)]


def move_to_devices(model: torch.nn.Module, world: World, previous: DeviceMap | None = None) -> DeviceMap | None:
    """Move a model to the device of this rank, or its modules to several; return the device map in that case.

    `previous` is that of the model before its parameters changed.

    Raises:
        InputError: the strategy does not fit the model, or a device is missing.
    """
    if world.strategy.name == "device_map":
        return apply_device_map(model, world, previous)
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
