"""The loss of a recipe, and the error of a step that is not finite."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from samestep.distributed.device_reads import device_reads
from samestep.distributed.torch_errors import (
    is_lost_connection,
    is_out_of_memory,
    operator_without_kernel,
    reason_of,
)
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError, NonFiniteError
from samestep.parallelize import any_rank
from samestep.recipes.bad_samples import parts_of
from samestep.report_text import class_name, message_of
from samestep.zoo.losses import IGNORED, bce_with_logits, cross_entropy

_MAX_REASON = 1_000  # characters
_MAX_LISTED = 8  # samples or parameters in an error
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
        returned = ""
        for part in parts.values():
            if not isinstance(part, torch.Tensor):
                returned = f"a {type(part).__name__}"
            elif part.numel() != 1:
                returned = f"a tensor of shape {tuple(part.shape)}"
        if "loss" not in parts:
            returned = f"a mapping with the keys {', '.join(map(str, parts))}"
        if returned:
            raise InputError(
                f"the loss function returned {returned}",
                expected="a scalar tensor, or a mapping with the scalar 'loss' and others",
                fix="return the mean over the batch, as the losses of torch.nn do",
                code="E_SHAPE",
            )
        losses = {}
        for name, part in parts.items():
            key = f"loss_{name}" if name != "loss" else "loss"
            losses[key] = part.reshape(())
        return losses

    def weight(self, targets: Any, samples: int) -> torch.Tensor | float:
        """Return the weight of the mean of a batch among the means of several batches."""
        if not (self._counts_targets and isinstance(targets, torch.Tensor)):
            return samples
        if targets.is_floating_point() and not self._is_binary:  # probabilities
            return samples
        is_counted = targets != self.ignore_index
        if self._class_weights is None:
            return is_counted.sum()
        # In float64, as the sums of an epoch.
        weights = torch.as_tensor(self._class_weights, dtype=torch.float64, device=targets.device)
        return (weights[targets.where(is_counted, 0)] * is_counted).sum()


# Of code that expects another input. Subclasses of RuntimeError report devices and ranks.
_MISFITS = (AttributeError, IndexError, KeyError, TypeError)


@contextmanager
def first_batch(name: str, data: Any) -> Iterator[None]:
    """Report that `name` cannot compute with `data` as invalid input, before the first update."""
    try:
        yield
    except (*_MISFITS, RuntimeError) as error:
        is_misfit = isinstance(error, _MISFITS) or type(error) is RuntimeError
        others = (is_lost_connection, is_out_of_memory, operator_without_kernel)
        if not is_misfit or any(is_other(error) for is_other in others):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # The last line outside of torch: that of the component that called torch.
        own = [frame for frame in frames if "/torch/" not in frame.filename]
        place = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}"
        reason = f"{class_name(error)}: {reason_of(message_of(error)[:_MAX_REASON])}"
        raise InputError(
            f"{name} cannot compute the first batch: {reason}",
            expected=f"a component that accepts {_described(data)}",
            fix=f"correct the recipe, or the code at {place}",
            code="E_SHAPE",
        ) from error


def _described(data: Any) -> str:
    """Return types and shapes of inputs, outputs or targets."""
    if isinstance(data, torch.Tensor):
        return f"{data.dtype} {tuple(data.shape)}"
    if isinstance(data, Mapping):
        data = [f"{name}: {_described(value)}" for name, value in list(data.items())[:_MAX_LISTED]]
        return f"{{{', '.join(data)}}}"
    if isinstance(data, tuple | list):
        return f"({', '.join(map(_described, data[:_MAX_LISTED]))})"
    return class_name(data)


def non_finite_error(
    data: tuple[Any, Any],
    samples: Sequence[int],
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    loss_of: Callable[[Any, Any], torch.Tensor],
    world: World,
    step: int,
    is_loss_finite: bool,
) -> NonFiniteError:
    """Return the error of a step; every sample is computed once more, alone. A collective.

    Args:
        data: inputs and targets of the batch, on the device.
        samples: indices of the samples.
        parameters: trained parameters by name, with the gradients of the step.
        loss_of: returns the loss of inputs and targets in evaluation mode, where samples are
            independent.
        world: the ranks.
        step: number of the step, from 1.
        is_loss_finite: whether the loss is finite, and a gradient is not.
    """
    own = [name for name, p in parameters.items() if p.grad is not None and not _is_finite(p.grad)]
    by_rank = all_gather(own, world)  # a rank may have parts of the model
    bad = [name for name in parameters if any(name in names for names in by_rank)]
    bad_samples = []
    alone = parts_of(data, len(samples), len(samples))
    for sample, (inputs, targets) in zip(samples, alone, strict=False):
        loss = loss_of(inputs, targets)
        is_finite = _is_finite(loss)
        if is_finite and is_loss_finite and parameters:
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            is_finite = all(_is_finite(g) for g in gradients if g is not None)
        if any(any_rank(world, not is_finite)):
            bad_samples.append(sample)
    source = _listed("sample", bad_samples)
    if not bad_samples:
        source = f"none of the {len(samples)} samples alone"
    subject = "the loss"
    advice = "check the learning rate"
    if is_loss_finite:
        subject = f"the gradient of {_listed('parameter', bad)}"
        advice = "lower the learning rate or set clip_norm"
    if is_loss_finite and not bad:  # the norm itself has an overflow
        subject = "the norm of the gradient"
    return NonFiniteError(
        f"step {step}: {subject} is not finite, from {source}",
        expected="non_finite: stop ends the run before the weights change",
        fix=f"check these samples, {advice}; non_finite: skip skips such steps",
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(device_reads.values(tensor.isfinite().all()))


def _listed(noun: str, items: Sequence[object]) -> str:
    plural = "s" if len(items) > 1 else ""
    text = f"{noun}{plural} {', '.join(map(str, items[:_MAX_LISTED]))}"
    if len(items) > _MAX_LISTED:
        text += f" and {len(items) - _MAX_LISTED} more"
    return text
