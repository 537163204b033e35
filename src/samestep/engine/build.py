"""Construction of an engine's components, in the order in which a model is prepared, divided and wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from samestep.config import StepConfig
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.batched import BatchedRunner
from samestep.engine.buffer_values import MicrobatchBuffers, Rule
from samestep.engine.buffers import ForwardState
from samestep.engine.callbacks import Callback, Intervention, of_microbatches
from samestep.engine.compatible_options import require_compatible
from samestep.engine.consistency import ConsistencyCheck
from samestep.engine.data_parallel import DataParallelRunner
from samestep.engine.ema import AveragedWeights
from samestep.engine.evaluation import EvaluationOutputs
from samestep.engine.global_loss import GlobalLossRunner
from samestep.engine.graphs import with_graphs
from samestep.engine.loss import LossFunction
from samestep.engine.merged import MergedRunner, why_separate
from samestep.engine.microbatch import SequentialRunner, StepRunner
from samestep.engine.microbatch_forward import MicrobatchForward
from samestep.engine.model_state import ModelState
from samestep.engine.model_transforms import transform_model
from samestep.engine.multi_loss import MultiLoss, as_step_loss
from samestep.engine.outside_state import OutsideState
from samestep.engine.pipeline import PipelineOutputs, PipelineRunner
from samestep.engine.sync_batch_norm_runner import SyncBatchNormRunner
from samestep.engine.witness import Witness, require_witness_support
from samestep.errors import InputError
from samestep.strategies.build import build_strategy, divide_model, move_to_devices
from samestep.strategies.device_map import DeviceMap
from samestep.strategies.local_parameters import LocalParameters, closure_error, replace_optimizer_parameters
from samestep.strategies.pipeline.strategy import PipelineStrategy, StageParameters
from samestep.strategies.strategy import Strategy, require_plain_model


class Components(NamedTuple):
    """Parts of an engine; `Engine` documents those that are its attributes too."""

    state: ModelState
    device_map: DeviceMap | None
    local_parameters: LocalParameters
    averaged: AveragedWeights | None
    runner: StepRunner
    outputs: EvaluationOutputs
    consistency: ConsistencyCheck
    witness: Witness | None


def build_components(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction | MultiLoss | None,
    world: World,
    config: StepConfig,
    check_every: int | None,
    witness_every: int | None,
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
    require_witness_support(witness_every, config, world, sync_batch_norm=sync_batch_norm)
    model_parameters = list(model.parameters())
    _require_optimizer_of([p for p in model_parameters if p.requires_grad], optimizer)
    if previous is not None:
        optimizer.zero_grad(set_to_none=True)  # a gradient may have another shape than the parameter has now
        previous.runner.strategy.close()

    device_map = move_to_devices(model, world)
    if previous is None:
        transform_model(model, config, world.device)
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
    strategy = build_strategy(model, local_parameters, config.reduction, world)
    receiving = local_parameters.names if strategy.defers_gradients else local_parameters.module_names
    kind, reason = _runner_class(strategy, world, config, witness_every, sync_batch_norm=sync_batch_norm)
    kind, no_graphs, replays = with_graphs(kind, strategy, world, config, callbacks)
    outputs = _evaluation_outputs(model, forward, strategy, world)
    state = _build_buffers(model, buffers, kind, is_whole=not local_parameters.is_divided)
    runner = kind(model, forward, strategy, state, scaler, receiving, world, of_microbatches(callbacks))
    runner.separate_reason, runner.graphs_reason, runner.replays_graphs = reason, no_graphs, replays
    model_state = ModelState(model, optimizer, config, sync_batch_norm, is_divided=local_parameters.is_divided)
    witness = Witness(witness_every, runner, world, previous and previous.witness) if witness_every else None
    return Components(model_state, device_map, local_parameters, averaged, runner, outputs, consistency, witness)


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
    return torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")


def _evaluation_outputs(
    model: torch.nn.Module, forward: MicrobatchForward, strategy: Strategy, world: World
) -> EvaluationOutputs:
    if isinstance(strategy, PipelineStrategy):
        return PipelineOutputs(model, forward, world, strategy.stages)
    return EvaluationOutputs(model, forward, world.data)


def _runner_class(
    strategy: Strategy, world: World, config: StepConfig, witness_every: int | None, *, sync_batch_norm: bool
) -> tuple[type[StepRunner], str | None]:
    """Return the class of the runner, and the reason for which it computes no microbatches together, if it could."""
    merges = config.reduction == "fast" and config.merge == "auto"
    is_witnessed = witness_every is not None
    reason = why_separate(config, world, strategy, sync_batch_norm=sync_batch_norm, is_witnessed=is_witnessed)
    kind: type[StepRunner] = BatchedRunner if config.reduction == "exact" else SequentialRunner
    kind = MergedRunner if merges and reason is None else kind
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
) -> MicrobatchBuffers | ForwardState:
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
        return MicrobatchBuffers(model)
    state = ForwardState(model, rules, is_whole=is_whole)
    if state.declared_parameters and runner_class not in (SequentialRunner, BatchedRunner):
        raise InputError(
            f"a rule for the parameter {state.declared_parameters[0]}",
            "under batch_norm: sync, gather: global and dp, microbatches computed together share the parameters",
            "write the parameter after engine.step, or remove these options",
            code="E_INCOMPATIBLE",
        )
    return state
