"""Microbatches computed on replicas of the model, by several threads at once or in lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.engine.microbatch import StepRunner
from samestep.engine.model_call import hooked_parameter
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree


class Replica(NamedTuple):
    """Copy of a model, which shares everything except parameters and buffers."""

    module: nn.Module
    parameters: dict[nn.Parameter, nn.Parameter]  # of the model, with their copies: the same memory, another `.grad`


def replicate(
    model: nn.Module,
    device: torch.device | None = None,
    weights: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> Replica:
    """Return a replica of `model`, copied as in `torch.nn.DataParallel`; tied and shared modules stay so.

    `device` is that of the buffers, and `weights` has the storage of the parameters; None for the model's own.

    Raises:
        InputError: a parameter has hooks, which would miss the gradients of a replica.
    """
    require_no_hooks(model)
    modules = list(model.modules())
    copies: dict[nn.Module, nn.Module] = {module: module._replicate_for_data_parallel() for module in modules}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for module, copy in copies.items():
        copy._modules = {name: None if child is None else copies[child] for name, child in module._modules.items()}
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in parameters:
                values = parameter if weights is None else weights[parameter]
                parameters[parameter] = nn.Parameter(values.detach(), parameter.requires_grad)
            copy._parameters[name] = None if parameter is None else parameters[parameter]
            if type(module).__setattr__ is not nn.Module.__setattr__:
                # Torch's recurrent modules, for example, have a second list of their parameters.
                setattr(copy, name, copy._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = buffer.detach().to(device or buffer.device, copy=True)
            copy._buffers[name] = None if buffer is None else buffers[buffer]
    return Replica(copies[model], parameters)


def require_no_hooks(model: nn.Module) -> None:
    """Refuse a model whose parameters have hooks.

    Raises:
        InputError: a parameter has.
    """
    if (name := hooked_parameter(model)) is not None:
        raise InputError(
            f"the parameter {name!r} has hooks",
            expected="batch_norm: sync and dp compute gradients of copies of the parameters, without hooks",
            fix="read .grad after the step, or set batch_norm: microbatch and --strategy ddp",
            code="E_PARAMETER_HOOKS",
        )


def require_untouched(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a model whose replica used the model's own parameters.

    Raises:
        InputError: some of `parameters`, the model's own, have a gradient.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise InputError(
            "the forward of a replica used the model's own parameters",
            expected="under batch_norm: sync and dp, modules are attributes of their parents, not entries of a list, "
            "bound methods or compiled functions",
            fix="use nn.ModuleList or nn.ModuleDict, do not compile the model, or set batch_norm: microbatch and "
            "--strategy ddp",
            code="E_INCOMPATIBLE",
        )


Weights = dict[nn.Parameter, torch.Tensor]
Gradients = list[torch.Tensor | None]


def set_gradients(
    runner: StepRunner, batch: GlobalBatch, tree: MicrobatchTree, microbatch: Microbatch, gradients: Gradients
) -> None:
    """Pass the gradients of one microbatch to the strategy."""
    last = microbatch is batch.local_microbatches[-1]
    with runner.strategy.microbatch(tree, microbatch.number, last=last):
        for parameter, gradient in zip(runner.names, gradients, strict=True):
            parameter.grad = gradient
