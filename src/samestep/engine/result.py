"""What an optimizer step came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    Attributes:
        step: its number, from 1.
        loss: mean loss of the global batch, before the update.
        count: what the sum was divided by: samples, or tokens.
        lr: learning rate of the first parameter group in this step.
        grad_norm: global 2-norm of the gradient, before clipping.
        skipped: the update was left out, for a loss or gradient that is not finite.
        stop: a rank was asked to end; leave the loop after this step.
        save: a rank wants a checkpoint of what this step led to (`Engine.step(save=True)`).
    """

    step: int
    loss: float
    count: float
    lr: float
    grad_norm: float
    skipped: bool
    stop: bool
    save: bool
