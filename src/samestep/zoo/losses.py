"""Losses of recipes: functions of the outputs and targets of a whole batch, with torch's means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from samestep.config.exclusions import excluded
from samestep.errors import InputError

IGNORED = -100  # value of targets that are not counted, as in torch


def cross_entropy(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: Sequence[float] | torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return torch's mean cross entropy of logits, computed in at least 32 bits.

    Args:
        outputs: logits, `(N, C)` or `(N, C, ...)`.
        targets: class numbers, `(N)` or `(N, ...)`; or probabilities of the shape of the logits.
        weight: one weight per class; a target counts with the weight of its class.
        ignore_index: targets with this value (padding) are not counted.
        label_smoothing: as in `torch.nn.CrossEntropyLoss`.

    Raises:
        InputError: the shapes do not match, a target is not the number of an output, or an option
            is invalid.
        RuntimeError: probabilities have another shape, or there is another number of weights.
    """
    _require_number("label_smoothing", label_smoothing, most=1)  # torch ignores negative values
    logits = _at_least_32_bits(outputs)
    weights = _class_weights(weight, logits)
    if targets.is_floating_point():
        return functional.cross_entropy(
            logits, targets.to(logits.dtype), weight=weights, label_smoothing=label_smoothing
        )
    if targets.shape != (*outputs.shape[:1], *outputs.shape[2:]):
        raise _other_shapes(
            outputs,
            targets,
            "logits (N, C, ...) and class numbers (N, ...)",
            "put the classes second: outputs.transpose(1, 2) for (N, T, C)",
        )
    classes = outputs.shape[1]
    if outputs.dim() > 2 and torch.are_deterministic_algorithms_enabled():
        # As rows: torch has no deterministic CUDA kernel for more dimensions.
        logits = logits.movedim(1, -1).reshape(-1, classes)
        targets = targets.reshape(-1)
    try:
        return functional.cross_entropy(
            logits,
            targets,
            weight=weights,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    except IndexError as error:
        raise InputError(
            f"the model has {classes} outputs per target, and one of the targets is not a number "
            f"of them: {error}",
            expected=f"class numbers from 0 to {classes - 1}, or ignore_index",
            fix="give the model one output per class (num_classes), or correct the targets",
            code="E_SHAPE",
        ) from error


def bce_with_logits(
    outputs: torch.Tensor, targets: torch.Tensor, *, foreground_weight: float = 1.0
) -> torch.Tensor:
    """Return the mean binary cross entropy of pixels.

    Args:
        outputs: logits `(N, 1, ...)`.
        targets: zeros and ones of the same shape; -100 is not counted.
        foreground_weight: factor for pixels of value 1; torch's `pos_weight`.

    Raises:
        InputError: shapes do not match, or the weight is not a number of at least 0.
    """
    logits, labels, is_counted = _binary(outputs, targets)
    _require_number("foreground_weight", foreground_weight)
    weight = torch.tensor(foreground_weight, dtype=logits.dtype, device=logits.device)
    # Not torch's mean, which would count the ignored pixels.
    losses = functional.binary_cross_entropy_with_logits(
        logits, labels, pos_weight=weight, reduction="none"
    )
    return (losses * is_counted).sum() / is_counted.sum()


def dice_loss(outputs: torch.Tensor, targets: torch.Tensor, *, smooth: float = 1.0) -> torch.Tensor:
    """Return one minus the mean Dice coefficient of the samples.

    The coefficient (Milletari et al., "V-Net", 2016, without squares) is computed per sample and
    averaged over classes. Samples with only ignored targets do not count.

    Args:
        outputs: logits `(N, 1, ...)` or `(N, C, ...)`.
        targets: zeros and ones of the shape of `outputs`, or class numbers `(N, ...)`; -100 is
            ignored.
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
    probabilities = probabilities * is_counted
    labels = labels * is_counted
    overlap = (probabilities * labels).sum(dim=dims)
    sizes = probabilities.sum(dim=dims) + labels.sum(dim=dims) + smooth
    counts = is_counted.flatten(1).any(dim=1)
    # Without `smooth`, the size of a sample that does not count is zero, and a product of NaN and
    # zero is NaN.
    dice = (2 * overlap + smooth) / sizes.where(counts[:, None], 1)
    return (1 - dice.mean(dim=1)).where(counts, 0).sum() / counts.sum()


def dice_plus(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    dice_weight: float = 1.0,
    smooth: float = 1.0,
    foreground_weight: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Return the cross entropy per pixel, the Dice loss per sample, and their sum as `loss`.

    Args:
        outputs: as in `dice_loss`.
        targets: as in `dice_loss`.
        dice_weight: factor of the Dice loss.
        smooth: as in `dice_loss`.
        foreground_weight: as in `bce_with_logits`; for binary masks.

    Raises:
        InputError: shapes do not match, or an option is invalid.
    """
    _require_number("dice_weight", dice_weight)
    if targets.is_floating_point():
        pixel = bce_with_logits(outputs, targets, foreground_weight=foreground_weight)
    elif foreground_weight != 1:
        raise excluded("foreground_weight without masks", foreground_weight, error=InputError)
    else:
        pixel = cross_entropy(outputs, targets)
    dice = dice_loss(outputs, targets, smooth=smooth)
    return {"loss": pixel + dice_weight * dice, "pixel": pixel, "dice": dice}


def _at_least_32_bits(values: torch.Tensor) -> torch.Tensor:
    # 16 bits lose accuracy over thousands of terms.
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _class_weights(
    weight: Sequence[float] | torch.Tensor | None, logits: torch.Tensor
) -> torch.Tensor | None:
    """Return one weight per class, of the type of the logits."""
    if weight is None:
        return None
    try:
        return torch.as_tensor(weight, dtype=logits.dtype, device=logits.device)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the loss has the weights {weight!r}",
            "a list of one number per class",
            "such as [1.0, 5.0]",
            code="E_VALUE",
        ) from error


def _require_number(name: str, value: float, most: float = math.inf) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        expected = "a number of at least 0"
        if most < math.inf:
            expected = f"a number from 0 to {most:g}"
        raise InputError(
            f"{name} is {value!r}",
            expected=expected,
            fix=f"set {name}: 1",
            code="E_VALUE",
        )


def _binary(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, targets with 0 for ignored values, and the mask of counted values."""
    if outputs.shape != targets.shape or outputs.shape[1] != 1:
        raise _other_shapes(outputs, targets, "(N, 1, ...) for both, with binary masks")
    logits = _at_least_32_bits(outputs)
    is_counted = targets != IGNORED
    return logits, targets.to(logits.dtype).where(is_counted, 0), is_counted


def _one_hot(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same for class numbers, as one channel of zeros and ones per class."""
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        raise _other_shapes(outputs, targets, "logits (N, C, ...) and class numbers (N, ...)")
    logits = _at_least_32_bits(outputs)
    is_counted = (targets != IGNORED).unsqueeze(1)
    # Not `functional.one_hot`, which refuses the numbers of ignored targets.
    classes = torch.arange(outputs.shape[1], device=targets.device)
    numbers = classes.view(-1, *([1] * (targets.ndim - 1)))
    return logits, (targets.unsqueeze(1) == numbers).to(logits.dtype), is_counted


def _other_shapes(
    outputs: torch.Tensor,
    targets: torch.Tensor,
    expected: str,
    fix: str = "correct data.options.classes, or the loss: cross_entropy for several classes",
) -> InputError:
    shape = tuple(targets.shape)
    return InputError(
        f"outputs have the shape {tuple(outputs.shape)} and targets of {targets.dtype} {shape}",
        expected=expected,
        fix=fix,
        code="E_SHAPE",
    )
