"""Segmentation losses as sums and counts (cross entropy per pixel, Dice per sample), and weights from masks."""

from __future__ import annotations

import torch
from torch.nn import functional

from samestep.engine.loss import Loss, cross_entropy
from samestep.engine.multi_loss import LossTerm, MultiLoss
from samestep.errors import InputError
from samestep.zoo.segmentation.masks import IGNORED


def bce_with_logits(
    outputs: torch.Tensor, targets: torch.Tensor, *, foreground_weight: float = 1.0, ignore_index: int = IGNORED
) -> Loss:
    """Return the summed binary cross entropy of pixels and the number of pixels.

    Args:
        outputs: logits `(N, 1, ...)`.
        targets: zeros and ones of the same shape.
        foreground_weight: factor for pixels of value 1; torch's `pos_weight`.
        ignore_index: target value that is neither summed nor counted.

    Raises:
        InputError: shapes do not match, or the weight is not a number.
    """
    logits, labels, is_counted = _binary(outputs, targets, ignore_index)
    if isinstance(foreground_weight, str):
        raise InputError(
            f"foreground_weight is {foreground_weight!r}",
            expected="a number; `from_masks` is valid in recipes whose data has binary masks",
            fix="set foreground_weight: 5.0",
            code="E_VALUE",
        )
    weight = torch.tensor(foreground_weight, dtype=logits.dtype, device=logits.device)
    losses = functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="none")
    return Loss((losses * is_counted).sum(), is_counted.sum())


def dice_loss(
    outputs: torch.Tensor, targets: torch.Tensor, *, smooth: float = 1.0, ignore_index: int = IGNORED
) -> Loss:
    """Return one minus the Dice coefficient (Milletari et al., "V-Net", 2016, without squares), and the sample count.

    The coefficient is computed per sample and averaged over classes, so it does not depend on the other samples of a
    microbatch. Samples with only ignored targets do not count.

    Args:
        outputs: logits `(N, 1, ...)` or `(N, C, ...)`.
        targets: zeros and ones of the shape of `outputs`, or class numbers `(N, ...)`.
        smooth: addition to numerator and denominator, for samples without foreground.
        ignore_index: ignored target value.

    Raises:
        InputError: shapes do not match.
    """
    if targets.is_floating_point():
        logits, labels, is_counted = _binary(outputs, targets, ignore_index)
        probabilities = logits.sigmoid()
    else:
        logits, labels, is_counted = _one_hot(outputs, targets, ignore_index)
        probabilities = logits.softmax(dim=1)
    dims = tuple(range(2, probabilities.ndim))
    probabilities, labels = probabilities * is_counted, labels * is_counted
    overlap = (probabilities * labels).sum(dim=dims)
    dice = (2 * overlap + smooth) / (probabilities.sum(dim=dims) + labels.sum(dim=dims) + smooth)
    sample_counts = is_counted.flatten(1).any(dim=1)
    return Loss(((1 - dice.mean(dim=1)) * sample_counts).sum(), sample_counts.sum())


class DicePlus(MultiLoss):
    """Sum of the cross entropy per pixel and the Dice loss per sample, each divided by its own count.

    Args:
        dice_weight: factor of the Dice loss.
        smooth: as in `dice_loss`.
        foreground_weight: as in `bce_with_logits`; for binary masks.
        ignore_index: ignored target value.
    """

    def __init__(
        self, dice_weight: float = 1.0, smooth: float = 1.0, foreground_weight: float = 1.0, ignore_index: int = IGNORED
    ) -> None:
        def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if targets.is_floating_point():
                loss = bce_with_logits(outputs, targets, foreground_weight=foreground_weight, ignore_index=ignore_index)
            else:
                loss = cross_entropy(outputs, targets, ignore_index=ignore_index)
            return loss.sum

        def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return dice_loss(outputs, targets, smooth=smooth, ignore_index=ignore_index).sum

        def count_samples(targets: torch.Tensor) -> torch.Tensor:
            return (targets != ignore_index).flatten(1).any(dim=1).sum()

        pixel_term = LossTerm("pixel", entropy, lambda targets: (targets != ignore_index).sum())
        super().__init__([pixel_term, LossTerm("dice", dice, count_samples, dice_weight)])


def _binary(outputs: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, ...]:
    """Return logits of at least 32 bits, targets with 0 for ignored values, and the mask of counted values."""
    _require_shapes(
        outputs.shape == targets.shape and outputs.shape[1] == 1,
        outputs,
        targets,
        "(N, 1, ...) for both, with binary masks",
        "use one output channel and data.options.classes: null, or the loss cross_entropy for several classes",
    )
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # sums of thousands of terms need 32 bits
    is_counted = targets != ignore_index
    return outputs.to(dtype), targets.to(dtype).where(is_counted, 0), is_counted


def _one_hot(outputs: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, ...]:
    """Return the same for class numbers, as one channel of zeros and ones per class."""
    _require_shapes(
        targets.shape == outputs.shape[:1] + outputs.shape[2:],
        outputs,
        targets,
        "logits (N, C, ...) and class numbers (N, ...)",
        "correct model.options.num_classes or data.options.classes",
    )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    is_counted = (targets != ignore_index).unsqueeze(1)
    numbers = torch.arange(outputs.shape[1], device=targets.device).view(-1, *([1] * (targets.ndim - 1)))
    return outputs.to(dtype), (targets.unsqueeze(1) == numbers).to(dtype), is_counted


def _require_shapes(is_valid: bool, outputs: torch.Tensor, targets: torch.Tensor, expected: str, fix: str) -> None:
    if not is_valid:
        problem = f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        raise InputError(problem, expected=expected, fix=fix, code="E_SHAPE")
