"""Losses of masks as sums and counts: pixels are counted one by one, overlaps sample by sample."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from samestep.engine.loss import Loss, cross_entropy
from samestep.engine.multi_loss import LossPart, MultiLoss
from samestep.errors import InputError
from samestep.recipes.masks.code import IGNORED


def bce_with_logits(
    outputs: torch.Tensor, targets: torch.Tensor, *, foreground_weight: float = 1.0, ignore_index: int = IGNORED
) -> Loss:
    """Binary cross entropy of each pixel's logit, summed, with the number of pixels.

    Args:
        outputs: logits `(N, 1, ...)`.
        targets: zeros and ones of the same shape.
        foreground_weight: factor of the loss of pixels that are 1; torch's `pos_weight`.
        ignore_index: targets of this value neither add to the sum nor count.

    Raises:
        InputError: shapes do not fit together, or the weight is a word.
    """
    _require_binary(outputs, targets)
    if isinstance(foreground_weight, str):
        raise InputError(
            f"foreground_weight is {foreground_weight!r}",
            rule="a number; `from_masks` is for recipes whose data has binary masks",
            do="foreground_weight: 5.0",
        )
    logits, wanted, counted = _counted(outputs, targets, ignore_index)
    weight = torch.tensor(foreground_weight, dtype=logits.dtype, device=logits.device)
    losses = functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight, reduction="none")
    return Loss((losses * counted).sum(), counted.sum())


def dice_loss(
    outputs: torch.Tensor, targets: torch.Tensor, *, smooth: float = 1.0, ignore_index: int = IGNORED
) -> Loss:
    """One minus the overlap of probabilities and mask (Milletari et al., "V-Net", 2016, without their squares).

    The overlap is that of one sample, averaged over classes, so neither the other samples of a shard nor the way a
    batch is cut can change it; samples are what is counted. One of which everything is ignored does not count.

    Args:
        outputs: logits: `(N, 1, ...)` with targets of the same shape, or `(N, C, ...)` with class numbers `(N, ...)`.
        smooth: added to the overlap and to what it is divided by, so that an empty mask has a loss too.
        ignore_index: targets of this value take no part.

    Raises:
        InputError: shapes do not fit together.
    """
    if targets.is_floating_point():
        _require_binary(outputs, targets)
        logits, wanted, counted = _counted(outputs, targets, ignore_index)
        found = logits.sigmoid()
    else:
        logits, wanted, counted = _by_class(outputs, targets, ignore_index)
        found = logits.softmax(dim=1)
    places = tuple(range(2, found.ndim))
    found, wanted = found * counted, wanted * counted
    both = (found * wanted).sum(dim=places)
    overlaps = (2 * both + smooth) / (found.sum(dim=places) + wanted.sum(dim=places) + smooth)
    is_counted = counted.flatten(1).any(dim=1)
    return Loss(((1 - overlaps.mean(dim=1)) * is_counted).sum(), is_counted.sum())


class DicePlus(MultiLoss):
    """The overlap of samples and the cross entropy of pixels, each divided by its own count.

    Args:
        dice_weight: factor of the overlap's mean; the cross entropy has 1.
        smooth: as in `dice_loss`.
        foreground_weight: as in `bce_with_logits`; for binary masks.
        ignore_index: targets of this value take no part.
    """

    def __init__(
        self,
        dice_weight: float = 1.0,
        smooth: float = 1.0,
        foreground_weight: float = 1.0,
        ignore_index: int = IGNORED,
    ) -> None:
        dice = partial(dice_loss, smooth=smooth, ignore_index=ignore_index)

        def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if targets.is_floating_point():
                weighted = partial(bce_with_logits, foreground_weight=foreground_weight)
                return weighted(outputs, targets, ignore_index=ignore_index).sum
            return cross_entropy(outputs, targets, ignore_index=ignore_index).sum

        super().__init__(
            [
                LossPart("pixel", entropy, lambda targets: (targets != ignore_index).sum()),
                LossPart(
                    "dice",
                    lambda outputs, targets: dice(outputs, targets).sum,
                    lambda targets: (targets != ignore_index).flatten(1).any(dim=1).sum(),
                    weight=dice_weight,
                ),
            ]
        )


def _require_binary(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    if outputs.shape != targets.shape or outputs.shape[1] != 1:
        raise InputError(
            f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            rule="for binary masks both are (N, 1, ...)",
            do="a model with one output channel, and data.options.classes: null; cross_entropy for several classes",
        )


def _counted(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in 32 bits at least, targets with 0 where they are ignored, and where they are not."""
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # thousands of terms in 16 bits would not add up
    counted = targets != ignored
    return outputs.to(dtype), targets.to(dtype).where(counted, 0), counted


def _by_class(
    outputs: torch.Tensor, targets: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of class numbers, with a channel of zeros and ones a class."""
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise InputError(
            f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            rule="logits (N, C, ...) and class numbers (N, ...)",
            do="look at model.options.num_classes and data.options.classes",
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    counted = (targets != ignored).unsqueeze(1)
    numbers = torch.arange(outputs.shape[1], device=targets.device).view(-1, *([1] * (targets.ndim - 1)))
    return outputs.to(dtype), (targets.unsqueeze(1) == numbers).to(dtype), counted
