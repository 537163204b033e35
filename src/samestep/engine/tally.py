"""The small message of a step: what each shard's loss was, whether somebody wants to stop or save, and the buffers.

One float64 vector a shard, summed over shards like the gradients. Losses and counts have a slot a shard, so that
their sum is all of them side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from samestep.runtime.world import World


@dataclass(frozen=True)
class Tally:
    """What all shards of a step said.

    Attributes:
        losses: each shard's summed loss; 0 where a shard has no samples.
        counts: each shard's count.
        stop: some rank was asked to end.
        save: some rank wants a checkpoint.
        buffers: the sum over shards of the buffers' values.
    """

    losses: list[float]
    counts: list[float]
    stop: bool
    save: bool
    buffers: torch.Tensor

    @property
    def count(self) -> float:
        """The global count: what the summed loss and gradient are divided by."""
        return math.fsum(self.counts)

    @property
    def loss(self) -> float:
        """The mean loss; `fsum` rounds once, so order cannot matter."""
        return rounded_sum(self.losses) / self.count if self.count else 0.0

    @property
    def bad_shards(self) -> list[int]:
        """Shards whose loss is not finite."""
        return [shard for shard, loss in enumerate(self.losses) if not math.isfinite(loss)]


def agreed(tally: Tally, world: World) -> Tally:
    """With what any rank of `world` asks for, also those that see the same shards as another; all of them call it."""
    said = torch.tensor([float(tally.stop), float(tally.save)], device=world.device)
    world.all_reduce(said)
    stop, save = said.tolist()
    return replace(tally, stop=stop > 0, save=save > 0)


def rounded_sum(values: list[float]) -> float:
    """The sum, rounded once; `fsum` has none where infinities or overflow make it not finite."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


def tally_length(shards: int, buffers: int) -> int:
    """Elements of the vector of a shard."""
    return 2 * shards + 2 + buffers


def write_tally(
    shards: int,
    shard: int,
    loss: torch.Tensor,
    count: torch.Tensor | float,
    buffers: torch.Tensor,
    *,
    stop: bool,
    save: bool,
) -> torch.Tensor:
    """The vector that one shard contributes."""
    vector = torch.zeros(tally_length(shards, len(buffers)), dtype=torch.float64, device=loss.device)
    vector[shard] = loss.detach().double()
    vector[shards + shard] = count
    vector[2 * shards] = float(stop)
    vector[2 * shards + 1] = float(save)
    vector[2 * shards + 2 :] = buffers
    return vector


def read_tally(shards: int, total: torch.Tensor) -> Tally:
    """The sum of all shards' vectors, taken apart."""
    *head, stop, save = total[: 2 * shards + 2].tolist()
    return Tally(head[:shards], head[shards:], stop > 0, save > 0, total[2 * shards + 2 :])
