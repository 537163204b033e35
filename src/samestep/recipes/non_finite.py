"""The error of a step with a loss or gradient that is not finite: names of samples and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from samestep.distributed.device_reads import device_reads
from samestep.distributed.world import World, all_gather
from samestep.errors import NonFiniteError
from samestep.global_view import any_rank
from samestep.recipes.samples import parts_of

_MAX_LISTED = 8


def skipped_most(skipped: int, steps: int) -> bool:
    """Return whether a run of `steps` steps, of which `skipped` were skipped, has failed."""
    return 2 * skipped > steps


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
    """Return the error of a step. Every sample of the batch is computed once more, alone.

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
    trained = list(parameters.values()) if is_loss_finite else []
    bad_samples = _bad_samples(data, samples, trained, loss_of, world)
    source = _listed("sample", bad_samples)
    if not bad_samples:
        source = f"none of the {len(samples)} samples alone"
    subject = "the loss"
    if is_loss_finite:
        subject = (
            f"the gradient of {_listed('parameter', bad)}" if bad else "the norm of the gradient"
        )
    advice = (
        "lower the learning rate or set clip_norm" if is_loss_finite else "check the learning rate"
    )
    return NonFiniteError(
        f"step {step}: {subject} is not finite, from {source}",
        expected="non_finite: stop ends the run before the weights change",
        fix=f"check these samples, {advice}; non_finite: skip skips such steps",
    )


def _bad_samples(
    data: tuple[Any, Any],
    samples: Sequence[int],
    parameters: Sequence[torch.nn.Parameter],
    loss_of: Callable[[Any, Any], torch.Tensor],
    world: World,
) -> list[int]:
    """Return the samples with a loss, or a gradient of one of the parameters, that is not finite."""
    bad = []
    for sample, (inputs, targets) in zip(
        samples, parts_of(data, len(samples), len(samples)), strict=False
    ):
        loss = loss_of(inputs, targets)
        is_finite = _is_finite(loss)
        if is_finite and parameters:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            is_finite = all(_is_finite(g) for g in gradients if g is not None)
        if any(any_rank(world, not is_finite)):
            bad.append(sample)
    return bad


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(device_reads.values(tensor.isfinite().all()))


def _listed(noun: str, items: Sequence[object]) -> str:
    listed = ", ".join(str(item) for item in items[:_MAX_LISTED])
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{noun}{'s' if len(items) > 1 else ''} {listed}{more}"
