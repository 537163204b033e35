"""Construction of an engine's components, in the order in which a model is prepared, divided and wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from samestep.config import StepConfig
from samestep.config.validation import match_patterns
from samestep.distributed.devices import set_tf32
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.batched import BatchedRunner
from samestep.engine.buffer_values import Rule
from samestep.engine.callbacks import Callback, Intervention, of_microbatches
from samestep.engine.consistency import ConsistencyCheck
from samestep.engine.ema import AveragedWeights
from samestep.engine.evaluation import EvaluationOutputs
from samestep.engine.global_loss import GlobalLossRunner
from samestep.engine.graphs import with_graphs
from samestep.engine.loss import LossFunction
from samestep.engine.merged import MergedRunner, why_separate
from samestep.engine.microbatch import MicrobatchForward, SequentialRunner, StepRunner
from samestep.engine.multi_loss import MultiLoss, as_step_loss
from samestep.engine.outside_state import OutsideState
from samestep.engine.pipeline import PipelineOutputs, PipelineRunner
from samestep.engine.replicas import DataParallelRunner, build_buffers
from samestep.engine.sync_batch_norm_runner import SyncBatchNormRunner
from samestep.engine.witness import Witness, require_witness_support
from samestep.errors import InputError
from samestep.strategies.build import build_strategy, divide_model, move_to_devices
from samestep.strategies.device_map import DeviceMap, require_sync_batch_norm_devices
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
    state = build_buffers(model, buffers, kind, is_whole=not local_parameters.is_divided)
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


class ModelState:
    """Parameters and norm layers for which components were built, to detect changes by the script.

    Attributes:
        sync_batch_norm: norm layers use statistics of the global batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: StepConfig,
        sync_batch_norm: bool,
        *,
        is_divided: bool,
    ) -> None:
        self.sync_batch_norm = sync_batch_norm
        self._optimizer, self._is_divided = optimizer, is_divided
        modules = list(model.modules())
        # The present values of these tables are all modules and parameters, as long as no value changes.
        self._modules = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        is_watched = config.batch_norm == "sync" and not sync_batch_norm
        self._norms = [module for module in modules if is_watched and isinstance(module, _BatchNorm)]
        self._objects, self._attributes = self._read()

    def is_current(self) -> bool:
        """Return whether parameters, the optimizer's groups and the use of batch statistics are unchanged."""
        objects, attributes = self._read()
        is_same = len(objects) == len(self._objects) and all(map(is_, objects, self._objects))
        return is_same and attributes == self._attributes

    def require_whole_model(self, world: World) -> None:
        """Refuse a change of parameters that are divided among ranks or devices.

        Raises:
            InputError: they are.
        """
        if self._is_divided or world.strategy.name == "device_map":
            raise InputError(
                "trained parameters, the optimizer's groups or the use of batch statistics changed after the engine "
                "was made",
                expected=f"under {world.mesh_shape.name}, they stay as they were when the engine was made",
                fix="change them before samestep.Engine(...), or use --strategy ddp",
                code="E_PARAMETERS_CHANGED",
            )

    def _read(self) -> tuple[list[object], list[object]]:
        parameters = [p for table in self._parameters for p in table.values() if p is not None]
        optimized = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        modules = chain.from_iterable(table.values() for table in self._modules)
        uses_batch = any(norm.training for norm in self._norms)
        if self._is_divided:  # FSDP exchanges the parameters themselves
            return [*modules, *optimized], [uses_batch, *(p.requires_grad for p in parameters)]
        attributes = [(p.requires_grad, p.dtype, p.shape) for p in parameters]
        return [*modules, *parameters, *optimized], [uses_batch, *attributes]


def require_compatible(config: StepConfig, world: World, model: torch.nn.Module, *, sync_batch_norm: bool) -> None:
    """Refuse options of a step that the strategy does not support.

    Raises:
        InputError: there is such an option.
    """
    option = "compile" if config.compile else "recompute"
    transforms, is_dp = config.compile or config.recompute, world.strategy.name == "dp"
    if config.precision == "fp16" and world.strategy.hook == "powersgd":
        raise _incompatible(
            "strategy.hook powersgd with step.precision fp16",
            "PowerSGD adds the residual of a step to the next gradients, and fp16 changes their scale",
            "set step.precision: bf16, or strategy.hook: fp16",
        )
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


def transform_model(model: torch.nn.Module, config: StepConfig, device: torch.device) -> None:
    """Set TF32, memory format, activation checkpointing and compilation, in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    set_tf32(device, allowed=config.tf32)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in _checkpointed_modules(model, config.recompute):
        module.forward = partial(_checkpointed_forward, module.forward)
    if config.compile:
        # Dropout draws the same numbers as without compilation. Kernels are compiled for one size each: the sizes seen
        # earlier on a rank must not select the kernel.
        torch._inductor.config.fallback_random = True
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        model.compile(dynamic=False)


def _checkpointed_forward(forward: Any, *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(forward, *arguments, use_reentrant=False, **named)


def _checkpointed_modules(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[torch.nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    names = match_patterns(modules, patterns, key="step.recompute", kind="module", example="blocks.*")
    # The outermost modules only: their children are recomputed with them.
    return [modules[name] for name in names if not any(name.startswith(f"{other}.") for other in names)]
