"""The tensors that ranks hold in common: what a step leaves the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def held_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers (those that are not saved too) and the optimizer's state, by what people call them."""
    held = {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}
    held |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    slots = optimizer_tensors(dict(model.named_parameters()), optimizer)
    return held | {f"optimizer {slot} of {name}": value for (name, slot), value in slots.items()}


def optimizer_tensors(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors of the optimizer's state by the parameter's name and the slot's, in the order of its groups."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        (names.get(parameter, "?"), slot): value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
