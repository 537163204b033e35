"""Construction of an engine's components, in the order in which a model is prepared, divided and wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import checkpoint

from samestep.config import StepConfig
from samestep.config.validation import match_patterns
from samestep.distributed.world import World
from samestep.engine.buffers import MicrobatchBuffers
from samestep.engine.callbacks import Callback
from samestep.engine.consistency import ConsistencyCheck
from samestep.engine.ema import AveragedWeights
from samestep.engine.evaluation import EvaluationOutputs
from samestep.engine.loss import LossFunction
from samestep.engine.microbatch import MicrobatchForward, SequentialRunner, StepRunner
from samestep.engine.multi_loss import MultiLoss, as_step_loss
from samestep.engine.pipeline import PipelineOutputs, PipelineRunner
from samestep.engine.replicas import DataParallelRunner, SyncBatchNormRunner
from samestep.errors import InputError
from samestep.strategies.build import build_strategy, divide_model, move_to_devices
from samestep.strategies.device_map import DeviceMap, require_sync_batch_norm_devices
from samestep.strategies.local_parameters import LocalParameters, replace_optimizer_parameters
from samestep.strategies.pipeline.strategy import PipelineStrategy, StageParameters

Modes = list[tuple[torch.nn.Module, bool]]


def training_modes(model: torch.nn.Module) -> Modes:
    """Return each module with its training mode: true except for norm layers with frozen parameters only.

    Such layers belong to a frozen pretrained part, and so do their running statistics.
    """

    def is_frozen_norm(module: torch.nn.Module) -> bool:
        parameters = list(module.parameters())
        frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
        return frozen and isinstance(module, _NormBase)

    return [(module, not is_frozen_norm(module)) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Set the training mode of each module."""
    for module, trains in modes:  # parents first: setting a module sets its children
        if module.training is not trains:
            module.train(trains)


def uses_batch_statistics(model: torch.nn.Module) -> bool:
    """Return whether a norm layer of the model uses statistics of the batch in training."""
    return any(
        isinstance(module, _BatchNorm) and (trains or module.running_mean is None)
        for module, trains in training_modes(model)
    )


class Components(NamedTuple):
    """Parts of an engine; `Engine` documents those that are its attributes too."""

    modes: Modes
    device_map: DeviceMap | None
    local_parameters: LocalParameters
    averaged: AveragedWeights | None
    runner: StepRunner
    outputs: EvaluationOutputs
    consistency: ConsistencyCheck


def build_components(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction | MultiLoss,
    world: World,
    config: StepConfig,
    check_every: int | None,
    ema: float | None,
    callbacks: Sequence[Callback],
) -> Components:
    """Prepare `model` and `optimizer` in place and return the engine's components.

    The order is fixed: modes and checks on the plain model, devices, transforms, division among ranks, the optimizer's
    parameters, the strategy's wrapper, the runner.

    Raises:
        InputError: model, optimizer, configuration and strategy do not fit together.
    """
    modes = training_modes(model)
    sync_batch_norm = config.batch_norm == "sync" and uses_batch_statistics(model)
    require_compatible(config, world, modes, sync_batch_norm=sync_batch_norm)
    model_parameters = list(model.parameters())
    _require_optimizer_of([p for p in model_parameters if p.requires_grad], optimizer)

    device_map = move_to_devices(model, world)
    transform_model(model, config, world.device)
    local_parameters = divide_model(model, world)
    if config.compile and isinstance(local_parameters, StageParameters):
        local_parameters.stages.compile()  # the model as a whole is never called
    replace_optimizer_parameters(optimizer, model_parameters, local_parameters)
    averaged = AveragedWeights(local_parameters.trained, ema) if ema is not None else None

    buffers = MicrobatchBuffers(model)
    forward = MicrobatchForward(as_step_loss(loss), config, world.device)
    strategy = build_strategy(model, local_parameters, config.reduction, world, concurrent=sync_batch_norm)
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
    receiving = local_parameters.names if strategy.defers_gradients else local_parameters.module_names
    runner_class: type[StepRunner] = SyncBatchNormRunner if sync_batch_norm else SequentialRunner
    if world.strategy.name == "dp":
        runner_class = DataParallelRunner
    outputs = EvaluationOutputs(model, forward, world.data)
    if isinstance(strategy, PipelineStrategy):
        runner_class, outputs = PipelineRunner, PipelineOutputs(model, forward, world, strategy.stages)
    runner = runner_class(model, forward, strategy, buffers, scaler, receiving, world, callbacks)
    # Ranks that divide the parameters hold different ones, so there is nothing to compare.
    compared = None if local_parameters.is_divided else check_every
    consistency = ConsistencyCheck(model, optimizer, world, compared, averaged)
    return Components(modes, device_map, local_parameters, averaged, runner, outputs, consistency)


def require_compatible(config: StepConfig, world: World, modes: Modes, *, sync_batch_norm: bool) -> None:
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
    has_batch_norm = any(isinstance(module, _BatchNorm) for module, _ in modes)
    if transforms and config.batch_norm == "sync" and has_batch_norm:
        raise _incompatible(
            f"step.{option} with step.batch_norm: sync",
            "batch norm over all microbatches runs copies of the model in lockstep, which excludes compiled "
            "and recomputed modules",
            f"set step.batch_norm: microbatch, or remove step.{option}",
        )
    if world.mesh_shape.pipeline > 1 and config.compile and world.strategy.schedule == "zero_bubble":
        raise _incompatible(
            "step.compile with strategy.schedule: zero_bubble",
            "zero_bubble splits the backward in two halves, and a compiled module has one backward",
            "set strategy.schedule: 1f1b, or remove step.compile",
        )
    if sync_batch_norm and world.strategy.name == "device_map":
        require_sync_batch_norm_devices(world)


def _incompatible(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_INCOMPATIBLE")


def _require_optimizer_of(parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that holds other parameters than the trained ones, whose gradients are reduced."""
    in_optimizer: set[Any] = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing, foreign = len(set(parameters) - in_optimizer), len(in_optimizer - set(parameters))
    if missing or foreign:
        raise InputError(
            f"{missing} trained parameters of the model are not in the optimizer, and {foreign} parameters of the "
            "optimizer are not in the model",
            expected="the optimizer holds exactly the model's parameters that require a gradient",
            fix="construct it from model.parameters(); freeze other parameters with requires_grad_(False)",
            code="E_OPTIMIZER",
        )


def transform_model(model: torch.nn.Module, config: StepConfig, device: torch.device) -> None:
    """Set TF32, memory format, activation checkpointing and compilation, in place; parameter names stay unchanged.

    Raises:
        InputError: a pattern matches no module.
    """
    if device.type == "cuda":
        # torch's default is TF32 for convolutions and full precision for matrix products.
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = config.tf32
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
