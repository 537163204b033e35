"""Losses, counts, requests and buffers of a step, reduced over microbatches in one small vector.

Each microbatch contributes one float64 vector, summed like the gradients. Losses and counts have one element per
microbatch, so their sum is the list of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    hashes: tuple[float, float]  # sums of the hash of the step, and of its square
    buffers: torch.Tensor  # sum over microbatches of the buffers' values, float64
    control: Sequence[float] = ()  # the first elements of `buffers`
    grad_norm: float = 0.0
    values: Sequence[float] = ()

    @classmethod
    def from_vector(
        cls,
        microbatches: int,
        total: torch.Tensor,
        control_length: int = 0,
        norm: torch.Tensor | None = None,
        values: Sequence[torch.Tensor] = (),
    ) -> StepStats:
        """Return the statistics from the sum of the vectors of all microbatches, and other scalars of the step.

        Everything is read at once: the only time in a step that the host waits for the device.
        """
        length = vector_length(microbatches, 0)
        scalars = [scalar.detach().double().view(1).to(total.device, non_blocking=True) for scalar in values]
        norms = [] if norm is None else [norm.double().view(1).to(total.device, non_blocking=True)]
        numbers = torch.cat([total[: length + control_length], *scalars, *norms]).tolist()
        grad_norm = numbers.pop() if norms else 0.0
        *head, stop, save, hashes, squares = numbers[:length]
        control, others = numbers[length : length + control_length], numbers[length + control_length :]
        buffers = total[length:]
        losses, counts = head[:microbatches], head[microbatches:]
        return cls(losses, counts, stop > 0, save > 0, (hashes, squares), buffers, control, grad_norm, others)

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
    return 2 * microbatches + 4 + buffers


def stats_vector(
    microbatches: int,
    microbatch: int,
    loss: Loss,
    buffers: torch.Tensor,
    requests: tuple[bool, bool] = (False, False),
    step_hash: int = 0,
) -> torch.Tensor:
    """Return the vector that one microbatch contributes to the sum, without a wait for the device.

    `requests` are those to stop and to save. `step_hash` is that of the collective check.
    """
    length = vector_length(microbatches, 0)
    vector = torch.zeros(length + len(buffers), dtype=torch.float64, device=loss.sum.device)
    vector[microbatch : microbatch + 1].copy_(loss.sum.detach().view(1))
    count = vector[microbatches + microbatch :][:1]
    # Writing a number to an element of a CUDA tensor would wait for the device; filling a slice does not.
    if isinstance(loss.count, torch.Tensor):
        count.copy_(loss.count.detach().view(1), non_blocking=True)
    else:
        count.fill_(loss.count)
    if any(requests) or step_hash:
        numbers = [*requests, step_hash, step_hash**2]
        vector[2 * microbatches : length].copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
    if len(buffers):
        vector[length:].copy_(buffers, non_blocking=True)
    return vector


def counts_of(microbatches: int, total: torch.Tensor) -> torch.Tensor:
    """Return the counts of all microbatches from the sum of their vectors."""
    return total[microbatches : 2 * microbatches]


def reduce_requests(microbatches: int, total: torch.Tensor, world: World) -> None:
    """Add the requests of all ranks, if several ranks compute the same microbatches; a collective."""
    requests = total[2 * microbatches : 2 * microbatches + 2].contiguous()
    world.all_reduce(requests)
    total[2 * microbatches : 2 * microbatches + 2] = requests
