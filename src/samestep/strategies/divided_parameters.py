"""Parameters that are divided between ranks: their full tensors, and their parts in checkpoints.

This module does not import the class of DTensors, which is slow and mostly not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.contents import SavedParameters, Values


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return type(tensor).__name__ == "DTensor" or hasattr(tensor, "_local_tensor")


class DividedParameters(SavedParameters):
    """Parameters of a module, some of them DTensors, for checkpoints. Optimizers have the same."""

    is_divided = True

    def full_values(self, values: Values) -> Iterator[tuple[str, str, Any]]:
        for name, slot, value in super().full_values(values):
            full = value
            if isinstance(value, torch.Tensor):
                full = full_tensor(value)
            yield name, slot, full

    def local_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        parameter: Any = self.local[name]
        # State of another shape has no parts, such as a number of steps.
        if not is_divided(parameter) or full.shape != parameter.shape:
            return full
        from samestep.strategies.dtensors import Division  # slow to import

        return Division.of(parameter).divided(full, parameter.device)


class StageParameters(DividedParameters):
    """Parameters of a module with stages on different ranks, for checkpoints.

    Args:
        module: the module.
        split: its strategy.
    """

    def __init__(self, module: nn.Module, split: Any) -> None:
        super().__init__(module)
        self._split = split

    def has(self, name: str) -> bool:
        return bool(self._split.has(self.local[name]))

    def full_values(self, values: Values) -> Iterator[tuple[str, str, Any]]:
        yield from self._split.full_values(self.local, values)


def divided_parameters(module: nn.Module) -> SavedParameters | None:
    """Return the parameters of a module for a checkpoint; None if each rank has all of them."""
    split = split_of(module)
    if split is not None:
        return StageParameters(module, split)
    if any(is_divided(parameter) for parameter in module.parameters()):
        return DividedParameters(module)
    return None


def split_of(module: nn.Module) -> Any:
    """Return the strategy of a module with stages on different ranks, if it is one."""
    # An attribute of the class that `samestep.parallel` gives a module.
    owner = getattr(type(module), "_samestep_owner", None)
    strategy = getattr(owner, "strategy", None)
    if getattr(strategy, "has_stages", False):
        return strategy
    return None


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor without a graph, or a complete tensor. A collective."""
    if not is_divided(tensor):
        return tensor
    from samestep.strategies.dtensors import full_value  # slow to import

    divided: Any = tensor
    return full_value(divided)


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a module with full tensors under the names of the plain module.

    Under `fsdp`, `hsdp` and `tp`, `module.state_dict()` has DTensors, which are gathered when every
    rank pickles them; under `pp` it has the parameters of the stage. The result has copies of all
    parts; under `ddp` it is `module.state_dict()`. Call it on every rank.

    Args:
        module: a module, with divided calls or not.
    """
    state = dict(module.state_dict())
    split = split_of(module)
    if split is not None:
        # With duplicates: a state dict has every name of a tied weight.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            state[name] = split.full_tensor(parameter)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = full_tensor(value.detach())
    return state
