"""A copy of a model that shares its weights, for one shard."""

from __future__ import annotations

from collections.abc import Sequence
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


def replicate(model: nn.Module) -> Replica:
    """A replica of `model`: what is used twice in it (tied weights, shared modules) is used twice in the replica.

    Modules are copied as `torch.nn.DataParallel` copies them.

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
                parameters[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
            copy._parameters[name] = None if parameter is None else parameters[parameter]
            if type(module).__setattr__ is not nn.Module.__setattr__:
                # Torch's recurrent modules, for one, keep another list of their parameters.
                setattr(copy, name, copy._parameters[name])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = buffer.detach().clone()
            copy._buffers[name] = None if buffer is None else buffers[buffer]
    return Replica(copies[model], parameters)


def _require_no_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"the parameter {name!r} has hooks",
                rule="under batch_norm: sync gradients are those of copies of a parameter until all shards are done",
                do="look at .grad after the step in the place of hooks, or set batch_norm: shard",
            )


def require_untouched(parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a model that reached its own parameters where it should have reached those of a replica.

    Raises:
        InputError: some of `parameters`, the model's own, have a gradient.
    """
    if any(parameter.grad is not None for parameter in parameters):
        raise InputError(
            "under batch_norm: sync the forward reached the model's own parameters in the place of a copy's",
            rule="modules are reached as attributes of their parents, not by a list, a method or a compiled function",
            do="hold modules in nn.ModuleList or nn.ModuleDict, do not compile the model, or set batch_norm: shard",
        )
