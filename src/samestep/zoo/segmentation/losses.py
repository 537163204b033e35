"""Segmentation losses as sums and counts (per pixel, Dice per sample), and the weight of the foreground from masks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from samestep.config import BadSamples, NamedConfig
from samestep.distributed.world import World, all_gather
from samestep.engine.loss import Loss, cross_entropy
from samestep.engine.multi_loss import LossTerm, MultiLoss
from samestep.errors import DataError, InputError, RecipeError
from samestep.zoo.segmentation.masks import IGNORED
from samestep.zoo.splits import Splits


def bce_with_logits(outputs: torch.Tensor, targets: torch.Tensor, *, foreground_weight: float = 1.0) -> Loss:
    """Return the summed binary cross entropy of pixels and the number of pixels.

    Args:
        outputs: logits `(N, 1, ...)`.
        targets: zeros and ones of the same shape; -100 is neither summed nor counted.
        foreground_weight: factor for pixels of value 1; torch's `pos_weight`.

    Raises:
        InputError: shapes do not match, or the weight is not a number of at least 0.
    """
    logits, labels, is_counted = _binary(outputs, targets)
    _require_number("foreground_weight", foreground_weight)
    weight = torch.tensor(foreground_weight, dtype=logits.dtype, device=logits.device)
    losses = functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="none")
    return Loss((losses * is_counted).sum(), is_counted.sum())


def dice_loss(outputs: torch.Tensor, targets: torch.Tensor, *, smooth: float = 1.0) -> Loss:
    """Return one minus the Dice coefficient (Milletari et al., "V-Net", 2016, without squares), and the sample count.

    The coefficient is computed per sample and averaged over classes, so it does not depend on the other samples of a
    microbatch. Samples with only ignored targets do not count.

    Args:
        outputs: logits `(N, 1, ...)` or `(N, C, ...)`.
        targets: zeros and ones of the shape of `outputs`, or class numbers `(N, ...)`; -100 is ignored.
        smooth: addition to numerator and denominator, for samples without foreground.

    Raises:
        InputError: shapes do not match, or `smooth` is not a number of at least 0.
    """
    _require_number("smooth", smooth)
    if targets.is_floating_point():
        logits, labels, is_counted = _binary(outputs, targets)
        probabilities = logits.sigmoid()
    else:
        logits, labels, is_counted = _one_hot(outputs, targets)
        probabilities = logits.softmax(dim=1)
    dims = tuple(range(2, probabilities.ndim))
    probabilities, labels = probabilities * is_counted, labels * is_counted
    overlap = (probabilities * labels).sum(dim=dims)
    sizes = probabilities.sum(dim=dims) + labels.sum(dim=dims) + smooth
    sample_counts = is_counted.flatten(1).any(dim=1)
    # Without `smooth`, the size of a sample that does not count is zero, and a product of NaN and zero is NaN.
    dice = (2 * overlap + smooth) / sizes.where(sample_counts[:, None], 1)
    return Loss((1 - dice.mean(dim=1)).where(sample_counts, 0).sum(), sample_counts.sum())


class DicePlus(MultiLoss):
    """Sum of the cross entropy per pixel and the Dice loss per sample, each divided by its own count.

    Args:
        dice_weight: factor of the Dice loss.
        smooth: as in `dice_loss`.
        foreground_weight: as in `bce_with_logits`; for binary masks.

    Raises:
        InputError: `dice_weight` is not a number of at least 0; from a step, shapes do not match.
    """

    def __init__(self, dice_weight: float = 1.0, smooth: float = 1.0, foreground_weight: float = 1.0) -> None:
        _require_number("dice_weight", dice_weight)

        def entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if targets.is_floating_point():
                return bce_with_logits(outputs, targets, foreground_weight=foreground_weight).sum
            if foreground_weight != 1:
                problem, fix = f"foreground_weight is {foreground_weight}, without binary masks", "remove the option"
                raise InputError(problem, "binary masks, which have a foreground", fix, code="E_INCOMPATIBLE")
            return cross_entropy(outputs, targets, ignore_index=IGNORED).sum

        def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return dice_loss(outputs, targets, smooth=smooth).sum

        def count_samples(targets: torch.Tensor) -> torch.Tensor:
            return (targets != IGNORED).flatten(1).any(dim=1).sum()

        pixel_term = LossTerm("pixel", entropy, lambda targets: (targets != IGNORED).sum())
        super().__init__([pixel_term, LossTerm("dice", dice, count_samples, dice_weight)])


def _require_number(name: str, value: float) -> None:
    if isinstance(value, str) or not value >= 0:
        raise InputError(
            f"{name} is {value!r}", expected="a number of at least 0", fix=f"set {name}: 1", code="E_VALUE"
        )


def _binary(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return logits of at least 32 bits, targets with 0 for ignored values, and the mask of counted values."""
    if outputs.shape != targets.shape or outputs.shape[1] != 1:
        raise _other_shapes(outputs, targets, "(N, 1, ...) for both, with binary masks")
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # sums of thousands of terms need 32 bits
    is_counted = targets != IGNORED
    return outputs.to(dtype), targets.to(dtype).where(is_counted, 0), is_counted


def _one_hot(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same for class numbers, as one channel of zeros and ones per class."""
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise _other_shapes(outputs, targets, "logits (N, C, ...) and class numbers (N, ...)")
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    is_counted = (targets != IGNORED).unsqueeze(1)
    numbers = torch.arange(outputs.shape[1], device=targets.device).view(-1, *([1] * (targets.ndim - 1)))
    return outputs.to(dtype), (targets.unsqueeze(1) == numbers).to(dtype), is_counted


def _other_shapes(outputs: torch.Tensor, targets: torch.Tensor, expected: str) -> InputError:
    return InputError(
        f"outputs have the shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
        expected=expected,
        fix="correct data.options.classes, or the loss: cross_entropy for several classes",
        code="E_SHAPE",
    )


def resolve_foreground_weight(
    loss: NamedConfig, splits: Splits, bad_samples: BadSamples, world: World
) -> tuple[NamedConfig, tuple[str, ...]]:
    """Return the loss with a number as `foreground_weight`, and a note. A collective operation.

    The weight is the number of background pixels divided by the number of foreground pixels. Each rank counts some of
    the masks; counts are integers, so their sums do not depend on the number of ranks.

    Raises:
        RecipeError: the dataset has no binary masks, or they have no foreground.
        DataError: a mask cannot be used and `bad_samples` is `stop`.
    """
    if loss.options.get("foreground_weight") != "from_masks":
        return loss, ()
    background, foreground, unusable = _count_pixels(splits, bad_samples, world)
    if not foreground:
        raise RecipeError(
            f"loss.options.foreground_weight is from_masks: {background} background pixels, no foreground",
            expected="binary masks with some foreground",
            fix="for several classes: --set 'loss={name: cross_entropy}'; otherwise correct data.options.mask_values",
            code="E_INCOMPATIBLE",
        )
    weight = background / foreground
    share = 100 * foreground / (background + foreground)
    left_out = f"; {unusable} masks cannot be used" if unusable else ""
    note = f"foreground weight {weight:.6g}: {share:.3g} % of the training masks is foreground{left_out}"
    return replace(loss, options=dict(loss.options) | {"foreground_weight": weight}), (note,)


def _count_pixels(splits: Splits, bad_samples: BadSamples, world: World) -> tuple[int, int, int]:
    """Return background pixels, foreground pixels and unusable masks over all ranks."""
    if splits.count_foreground is None:
        return 0, 0, 0
    background = foreground = 0
    errors: list[int] = []
    for index in range(world.rank, len(splits.train), world.size):
        world.context.status.heartbeat()
        try:
            counts = splits.count_foreground(index)
        except DataError:
            errors.append(index)
        else:
            background += counts[0]
            foreground += counts[1]
    gathered = all_gather([background, foreground, errors], world)
    unusable = sorted(index for _, _, indices in gathered for index in indices)
    if unusable and bad_samples == "stop":
        splits.count_foreground(unusable[0])  # raises the same error on every rank
    return sum(counts[0] for counts in gathered), sum(counts[1] for counts in gathered), len(unusable)
