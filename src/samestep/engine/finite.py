"""What to say of a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.data.batch import GlobalBatch
from samestep.engine.tally import Tally
from samestep.errors import NonFiniteError

_SHOWN = 8


def bad_loss(step: int, batch: GlobalBatch, tally: Tally, shards: Sequence[int]) -> NonFiniteError:
    """The error for a step in which the loss of some shards is not finite.

    Args:
        shards: those that made it so.
    """
    samples = [sample for shard in shards for sample in batch.samples_of(shard)]
    return NonFiniteError(
        f"step {step}: the loss of {_plural('shard', shards)} is not finite "
        f"(loss {tally.losses[shards[0]]}; {_plural('sample', samples)})",
        rule="non_finite: stop ends the run before the weights change",
        do="look at these samples and the learning rate; non_finite: skip leaves such steps out",
    )


def bad_gradient(
    step: int, batch: GlobalBatch, parameters: Sequence[str], shards: Sequence[int] | None
) -> NonFiniteError:
    """The error for a step with a finite loss whose gradient is not.

    Args:
        parameters: names of those whose gradient has elements that are not finite.
        shards: those that have such a gradient alone; None where that cannot be told.
    """
    if shards is None:
        where = "from which shards cannot be told where ranks divide the parameters (ddp can)"
    elif shards:
        samples = [sample for shard in shards for sample in batch.samples_of(shard)]
        where = f"from {_plural('shard', shards)} ({_plural('sample', samples)})"
    else:
        where = "though every shard's is finite alone: their sum or its norm overflows"
    what = _plural("parameter", parameters) if parameters else "the whole model"
    return NonFiniteError(
        f"step {step}: the gradient of {what} is not finite, {where}",
        rule="non_finite: stop ends the run before the weights change",
        do="look at these samples, lower the learning rate or set clip_norm; non_finite: skip leaves such steps out",
    )


def is_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether every element of all `gradients` is finite."""
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _plural(noun: str, items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{noun}{'s' if len(items) > 1 else ''} {shown}{more}"
