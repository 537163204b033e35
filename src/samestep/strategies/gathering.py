"""Full values of divided parameters, and divided gradients, in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.reduce.fast import Reduction
from samestep.strategies.divided_parameters import full_tensor
from samestep.strategies.tensor_division import Division
from samestep.view.crossings import crossing, leave, replicated
from samestep.view.hub import Hub
from samestep.view.slots import ParameterSlots, replaced
from samestep.view.strategy import CallParameters, Strategy


class Differentiable(CallParameters):
    """Gathered parameters; their gradients are summed over ranks and can be differentiated."""

    def __init__(
        self, module: nn.Module, divided: Sequence[DTensor], hub: Hub | None, strategy: Strategy
    ) -> None:
        self._slots = ParameterSlots(module)
        self._divided = divided
        self._hub = hub
        self._strategy = strategy

    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the divided parameters."""
        return list(self._divided)

    @contextmanager
    def in_place(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Surround a forward with gathered parameters."""
        count = len(self._divided)
        mapping: dict[torch.Tensor, torch.Tensor] = {
            one: gathered(leaf, self._strategy.reduction)
            for one, leaf in zip(self._divided, leaves, strict=False)
        }
        with ExitStack() as stack:
            if self._hub is not None:
                stack.enter_context(self._hub.in_place(leaves[count:]))
            stack.enter_context(replaced(self._slots.entries(mapping)))
            yield


def gathered(
    parameter: torch.Tensor,
    reduction: Reduction | None,
    full: Callable[[torch.Tensor], torch.Tensor] = full_tensor,
) -> torch.Tensor:
    """Return the full value of a divided parameter; its gradient becomes divided. Differentiable.

    Args:
        parameter: the parameter, or a tensor that is divided like it.
        reduction: sums the gradients over ranks; None if they are equal on all ranks.
        full: returns the full value.
    """

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        gradient = replicated(gradient)
        if reduction is not None:
            gradient = leave([gradient], reduction)
        return [_divided(gradient, division, device, reduction)]

    division = Division.of(cast(DTensor, parameter))
    device = parameter.device
    return crossing([parameter], lambda value: [full(value)], back)[0]


def _divided(
    full: torch.Tensor, division: Division, device: torch.device, reduction: Reduction | None
) -> torch.Tensor:
    """Return a full tensor divided between the ranks; its gradient becomes full. Differentiable."""

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        # Gradients of operations with the whole parameter are complete.
        return [gathered(gradient, reduction) if isinstance(gradient, DTensor) else gradient]

    return crossing([full], lambda value: [division.divided(value, device)], back)[0]


def as_divided(
    division: Division, device: torch.device, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a gradient divided as its parameter; operations with the whole parameter give one that is not."""
    if gradient is None or isinstance(gradient, DTensor):
        return gradient
    return _divided(gradient, division, device, None)
