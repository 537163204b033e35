"""Losses, counts, requests and buffers of a step, reduced over microbatches in one small vector.

Each microbatch contributes one float64 vector, summed like the gradients. Losses and counts have one element per
microbatch, so their sum is the list of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from samestep.distributed.world import World
from samestep.engine.loss import Loss
from samestep.metrics.counts import rounded_sum


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the global batch, before the update.
        count: divisor of the summed loss: samples, or tokens.
        lr: learning rate of the first parameter group in this step.
        grad_norm: global 2-norm of the gradient, before clipping.
        skipped: the update was skipped because of a non-finite loss or gradient.
        stop: a rank received a stop request; leave the loop after this step.
        save: a rank requested a checkpoint of the state after this step (`Engine.step(save=True)`).
        values: values for logging that the forward function returned, as means over the global batch.
    """

    step: int
    loss: float
    count: float
    lr: float
    grad_norm: float
    skipped: bool
    stop: bool
    save: bool
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepStats:
    """Reduced statistics of a step."""

    losses: list[float]  # summed loss of each microbatch; 0 for a microbatch without samples
    counts: list[float]  # of each microbatch
    stop: bool  # a rank received a stop request
    save: bool  # a rank requested a checkpoint
    buffers: torch.Tensor  # sum over microbatches of the buffers' values, float64

    @classmethod
    def from_vector(cls, microbatches: int, total: torch.Tensor) -> StepStats:
        """Return the statistics from the sum of the vectors of all microbatches."""
        *head, stop, save = total[: 2 * microbatches + 2].tolist()
        return cls(head[:microbatches], head[microbatches:], stop > 0, save > 0, total[2 * microbatches + 2 :])

    @property
    def count(self) -> float:
        """Global count: the divisor of the summed loss and gradient."""
        return math.fsum(self.counts)

    @property
    def loss(self) -> float:
        """Mean loss."""
        return rounded_sum(self.losses) / self.count if self.count else 0.0

    @property
    def bad_microbatches(self) -> list[int]:
        """Microbatches with a non-finite loss."""
        return [microbatch for microbatch, loss in enumerate(self.losses) if not math.isfinite(loss)]


def vector_length(microbatches: int, buffers: int) -> int:
    """Return the length of a microbatch's vector with `buffers` buffer elements."""
    return 2 * microbatches + 2 + buffers


def stats_vector(
    microbatches: int, microbatch: int, loss: Loss, buffers: torch.Tensor, *, stop: bool, save: bool
) -> torch.Tensor:
    """Return the vector that one microbatch contributes to the sum."""
    vector = torch.zeros(vector_length(microbatches, len(buffers)), dtype=torch.float64, device=loss.sum.device)
    vector[microbatch] = loss.sum.detach().double()
    vector[microbatches + microbatch] = loss.count
    vector[2 * microbatches] = float(stop)
    vector[2 * microbatches + 1] = float(save)
    vector[2 * microbatches + 2 :] = buffers
    return vector


def reduce_requests(stats: StepStats, world: World) -> StepStats:
    """Return `stats` with the requests of all ranks, if several ranks compute the same microbatches; a collective."""
    requests = torch.tensor([float(stats.stop), float(stats.save)], device=world.device)
    world.all_reduce(requests)
    stop, save = requests.tolist()
    return replace(stats, stop=stop > 0, save=save > 0)
