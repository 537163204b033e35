"""Optimizer without updates, for gradients that another library uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GradientsOnly(torch.optim.Optimizer):
    """Optimizer without updates: `Engine.step` leaves the gradient of the global batch in `.grad`.

    The library clips the gradients and updates the parameters.

    Args:
        model: the optimizer holds its trained parameters.
    """

    has_rate = False  # `lr` has no meaning

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        super().__init__(self._trained(), {"lr": 0.0})

    def follow(self) -> None:
        """Adapt to parameters that have been added, replaced, frozen or unfrozen."""
        self.param_groups[0]["params"] = self._trained()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Leave the parameters unchanged."""

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]
