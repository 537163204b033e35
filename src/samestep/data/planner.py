"""Division of the global batches of an epoch into requests of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from samestep.data.batch import MicrobatchRequest
from samestep.data.permutation import Indices, Order
from samestep.distributed.world import World
from samestep.microbatches import microbatch_bounds, microbatches_of_short_batch, owned_microbatches, rank_count


class BatchPlan(NamedTuple):
    """One global batch, with the requests of this rank."""

    span: slice  # positions in the epoch
    indices: Indices
    requests: list[MicrobatchRequest]


@dataclass
class BatchPlanner:
    """Divides global batches into microbatches, and requests those of this rank.

    Attributes:
        batch_size: samples of a complete global batch.
        microbatches: number of microbatches of a complete global batch.
        keeps_size: a batch with fewer samples has fewer microbatches.
        equal_counts: every rank requests equally many microbatches of a batch, with fillers after its own.
        world: the ranks.
    """

    batch_size: int
    microbatches: int
    keeps_size: bool
    equal_counts: bool
    world: World

    def plans(self, epoch: int, order: Order, repeats: Indices | None, positions: range) -> Iterator[BatchPlan]:
        """Yield the batches that start at `positions` and end before `positions.stop`, each computed when needed.

        `repeats` has one number per position of the epoch, or is None if no index occurs twice.
        """
        for start in positions:
            span = slice(start, min(start + self.batch_size, positions.stop))
            indices = order[span]
            counts = numpy.zeros_like(indices) if repeats is None else repeats[span]
            yield BatchPlan(span, indices, self.requests(epoch, indices, counts))

    def number_of(self, batch: Indices) -> int:
        """Return the number of microbatches of a batch."""
        if not self.keeps_size or len(batch) == self.batch_size:
            return self.microbatches
        return microbatches_of_short_batch(len(batch), self.batch_size, self.microbatches)

    def requests(self, epoch: int, batch: Indices, repeats: Indices) -> list[MicrobatchRequest]:
        """Return the requests of this rank: for its non-empty microbatches, and for fillers."""
        number, shares = self.number_of(batch), self.world.data.shares
        bounds = [slice(*bound) for bound in microbatch_bounds(len(batch), number)]

        def filled(rank: int) -> list[int]:
            owned = owned_microbatches(number, shares, rank)
            return [number for number in owned if bounds[number].start < bounds[number].stop]

        own = filled(self.world.data.rank)
        local = [MicrobatchRequest(epoch, n, batch[bounds[n]], repeats[bounds[n]]) for n in own]
        if not self.equal_counts:
            return local
        # As many microbatches as any other rank. Two samples if possible: batch norm cannot train on one.
        filler = MicrobatchRequest(epoch, 0, batch[:2], repeats[:2], is_filler=True)
        return local + [filler] * (max(len(filled(rank)) for rank in range(rank_count(shares))) - len(own))
