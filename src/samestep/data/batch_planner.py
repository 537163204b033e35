"""Division of the global batches of an epoch into requests of one rank, with short last batches and fillers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from samestep.data.microbatch_dataset import MicrobatchRequest
from samestep.data.order import Indices, Order
from samestep.data.streams.order import BatchSizes
from samestep.distributed.world import World
from samestep.microbatches import microbatch_bounds, owned_microbatches, rank_count


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
        equal_counts: every rank requests equally many microbatches of a batch, with fillers after its own. Fillers have
            no share in the result. Strategies that communicate in every forward and backward, such as `fsdp`, need
            them on ranks with fewer microbatches than others.
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

    def number_of(self, size: int) -> int:
        """Return the number of microbatches of a batch of `size` samples."""
        if not self.keeps_size or size == self.batch_size:
            return self.microbatches
        return microbatches_of_short_batch(size, self.batch_size, self.microbatches)

    def slot_sizes(self, samples: int) -> BatchSizes:
        """Return the sizes for the slots of an epoch of `samples` samples."""
        return BatchSizes(self.batch_size, self.microbatches, self.number_of(samples % self.batch_size))

    def requests(self, epoch: int, batch: Indices, repeats: Indices) -> list[MicrobatchRequest]:
        """Return the requests of this rank: for its non-empty microbatches, and for fillers.

        Args:
            epoch: number of the epoch.
            batch: indices of the samples of the global batch.
            repeats: how often each index occurs before in the epoch.
        """
        number, shares = self.number_of(len(batch)), self.world.data.shares
        bounds = [slice(*bound) for bound in microbatch_bounds(len(batch), number)]

        def filled(rank: int) -> list[int]:
            owned = owned_microbatches(number, shares, rank)
            return [number for number in owned if bounds[number].start < bounds[number].stop]

        own = filled(self.world.data.rank)
        local = [MicrobatchRequest(epoch, n, batch[bounds[n]], repeats[bounds[n]]) for n in own]
        if not self.equal_counts:
            return local
        largest = max(len(filled(rank)) for rank in range(rank_count(shares)))
        # Two samples if possible, because batch norm cannot train on one.
        filler = MicrobatchRequest(epoch, 0, batch[:2], repeats[:2], is_filler=True)
        return local + [filler] * (largest - len(own))


def microbatches_of_short_batch(size: int, batch_size: int, microbatches: int) -> int:
    """Return the number of microbatches of a batch of `size` samples for a model with batch norm.

    As many as in other batches if each has at least 2 samples, of which a variance exists; otherwise as many as have
    the size of microbatches in other batches, and at least one.
    """
    if size >= 2 * microbatches:
        return microbatches
    return max(1, size // max(2, batch_size // microbatches))
