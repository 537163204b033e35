"""The tensors that ranks hold in common: what a step leaves the same on all of them."""

from __future__ import annotations

import torch


def held_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers (those that are not saved too) and the optimizer's state, by what people call them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = {f"parameter {name}": parameter.detach() for parameter, name in names.items()}
    held |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    held[f"optimizer {slot} of {names.get(parameter, '?')}"] = value
    return held
