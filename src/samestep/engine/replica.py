"""A copy of a model that shares its weights, for one shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from samestep.errors import InputError


@dataclass(frozen=True)
class Replica:
    """A copy of a model whose gradients and buffers are its own.

    Attributes:
        module: copies of the modules, which share everything that is neither a parameter nor a buffer.
        parameters: each parameter of the model with the one that stands for it here: the same memory, another `.grad`.
    """

    module: nn.Module
    parameters: dict[nn.Parameter, nn.Parameter]


def replicate(
    model: nn.Module,
    device: torch.device | None = None,
    weights: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> Replica:
    """A replica of `model`: what is used twice in it (tied weights, shared modules) is used twice in the replica.

    Modules are copied as `torch.nn.DataParallel` copies them.

    Args:
        device: where its buffers are; None for where they are in the model.
        weights: what its parameters share, each of the model's with its copy; None for the model's own memory.

    Raises:
        InputError: a parameter has hooks, which would not hear of a replica's gradients.
    """
    _require_no_hooks(model)
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
                # Torch's recurrent modules, for one, keep another list of their parameters.
                setattr(copy, name, copy._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = buffer.detach().to(device or buffer.device, copy=True)
            copy._buffers[name] = None if buffer is None else buffers[buffer]
    return Replica(copies[model], parameters)


def _require_no_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"the parameter {name!r} has hooks",
                rule="under batch_norm: sync, and dp, gradients are those of copies of parameters till shards are done",
                do="look at .grad after the step in the place of hooks, or set batch_norm: shard and --strategy ddp",
            )


def require_untouched(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a model that reached its own parameters where it should have reached those of a replica.

    Raises:
        InputError: some of `parameters`, the model's own, have a gradient.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise InputError(
            "the forward of a copy of the model reached the model's own parameters in the place of the copy's",
            rule="under batch_norm: sync, and dp, modules are reached as attributes of their parents, not by a list, a "
            "method or a compiled function",
            do="hold modules in nn.ModuleList or nn.ModuleDict, do not compile the model, or set batch_norm: shard and "
            "--strategy ddp",
        )
