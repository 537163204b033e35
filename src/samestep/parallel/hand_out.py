"""A model that one rank alone has built, handed out part by part: no device ever holds all of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.errors import InputError
from samestep.parallel.division import division_of
from samestep.parallel.same_start import take_from_first, tensors_of
from samestep.runtime.world import World


def set_aside(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """The values of a model, which stays without any on the meta device; empty on ranks that never had them.

    Raises:
        InputError: a parameter has two names, or rank 0 has no values either.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in named}) < len(named):
        raise InputError(
            "strategy.meta with a model that uses a parameter under two names",
            rule="what is handed out by name has one",
            do="leave strategy.meta out",
        )
    values = {name: tensor.detach() for name, tensor in tensors_of(model).items()} if world.is_main else {}
    if any(tensor.is_meta for tensor in values.values()):
        raise InputError(
            "the model has no values on rank 0 either",
            rule="under strategy.meta rank 0 builds the model with values, and the others on the meta device",
            do="with torch.device('meta') if world.rank else nullcontext(): model = ...",
        )
    model.to("meta")
    return values


def hand_out(model: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device, world: World) -> None:
    """Fill a divided model without values from rank 0's, one tensor after the other.

    Args:
        values: what `set_aside` returned here.
        device: where the parts are to lie.
    """
    model.to_empty(device=device)
    for name, tensor in tensors_of(model).items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        if world.is_main:
            whole.copy_(values[name])
        take_from_first(whole, world)
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                tensor.to_local().copy_(division_of(tensor).part(whole))
            else:
                tensor.copy_(whole)
