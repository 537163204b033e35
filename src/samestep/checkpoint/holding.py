"""What a rank has of a model whose state is saved: all of it, unless ranks divide it among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Holding(Protocol):
    """What a rank has of each parameter.

    Attributes:
        held: by the model's names, what the optimizer moves.
        is_divided: some are parts. Then every rank packs, and all of them gather.
    """

    @property
    def held(self) -> Mapping[str, torch.nn.Parameter]: ...

    @property
    def is_divided(self) -> bool: ...

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A parameter, or what belongs to it element by element, from the parts of all ranks; all of them call it."""

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor of the parameter's shape; a tensor of another shape as it is."""

    def everywhere(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """What belongs to parameters, in one order on all ranks, which all call it.

        What only other ranks have is there too: numbers as they are, tensors without values, for `whole` to fill.
        """


class WholeModel:
    """A rank that has everything."""

    is_divided = False

    def __init__(self, model: torch.nn.Module) -> None:
        self.held = dict(model.named_parameters())

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        return part

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def everywhere(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        return values


def gathered(parts: Mapping[str, torch.Tensor], holding: Holding, *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters, one gathered after the other, in the host's memory."""
    whole = {}
    for name, part in parts.items():
        tensor = holding.whole(name, part)
        if keep:
            whole[name] = tensor.cpu().contiguous().clone()
    return whole
