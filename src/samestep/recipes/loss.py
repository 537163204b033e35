"""The loss of a recipe: scalars of a whole batch, and the weight of a batch in a mean over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from samestep.errors import InputError
from samestep.zoo.losses import IGNORED, bce_with_logits, cross_entropy

LossFunction = Callable[[Any, Any], Any]
# Losses with a mean over targets that are not ignored.
_BY_TARGET = (cross_entropy, bce_with_logits, functional.cross_entropy, functional.nll_loss)
_MODULES_BY_TARGET = (nn.CrossEntropyLoss, nn.NLLLoss)


class RecipeLoss:
    """A loss function with results of one form.

    The mean of several batches is weighted by the count of each mean: targets that are not ignored,
    with their class weights, for the losses of which this is known, and samples for others.

    Attributes:
        ignore_index: targets of this value are not counted, neither by the loss nor by metrics.

    Args:
        function: from the outputs and targets of a batch to a scalar, or to a mapping with `loss`
            and other scalars, which evaluation reports as `loss_NAME`.
    """

    def __init__(self, function: LossFunction) -> None:
        self._function = function
        options: Mapping[str, Any] = {}
        known: Any = function
        if isinstance(function, partial):
            options = function.keywords
            known = function.func
        self._counts_targets = known in _BY_TARGET or isinstance(function, _MODULES_BY_TARGET)
        self._is_binary = known is bce_with_logits
        self._class_weights = options.get("weight", getattr(function, "weight", None))
        self.ignore_index: int = options.get(
            "ignore_index", getattr(function, "ignore_index", IGNORED)
        )

    def __call__(self, outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        """Return `loss`, and other scalars as `loss_NAME`.

        Raises:
            InputError: the function returned something else than scalars.
        """
        value = self._function(outputs, targets)
        parts = value if isinstance(value, Mapping) else {"loss": value}
        if "loss" not in parts:
            raise _no_loss(f"a mapping with the keys {', '.join(map(str, parts))}")
        losses = {}
        for name, part in parts.items():
            if not isinstance(part, torch.Tensor) or part.numel() != 1:
                shape = f" of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else ""
                raise _no_loss(f"a {type(part).__name__}{shape}")
            losses["loss" if name == "loss" else f"loss_{name}"] = part.reshape(())
        return losses

    def weight(self, targets: Any, samples: int) -> torch.Tensor | float:
        """Return the weight of the mean of a batch of `samples` samples among the means of several batches."""
        if not (self._counts_targets and isinstance(targets, torch.Tensor)):
            return samples
        if targets.is_floating_point() and not self._is_binary:  # probabilities
            return samples
        is_counted = targets != self.ignore_index
        if self._class_weights is None:
            return is_counted.sum()
        weights = torch.as_tensor(self._class_weights, dtype=torch.float64, device=targets.device)
        return (weights[targets.where(is_counted, 0)] * is_counted).sum()


def _no_loss(returned: str) -> InputError:
    return InputError(
        f"the loss function returned {returned}",
        expected="a scalar tensor, or a mapping with the scalar 'loss' and others",
        fix="return the mean over the batch, as the losses of torch.nn do",
        code="E_SHAPE",
    )
