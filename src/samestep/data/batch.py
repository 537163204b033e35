"""A global batch as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from samestep.cursor import Cursor
from samestep.data.order import Indices
from samestep.sharding import shard_bounds


class Shard(NamedTuple):
    """One shard with its data.

    Attributes:
        number: which of the global batch's shards, from 0.
        size: samples in it that count; 0 where none could be used, and `data` is there to fill the place.
        data: what the collate function made of them; the engine wants a pair `(inputs, targets)`.
        skipped: what was wrong with those that were left out.
        is_filler: it is no shard of the batch, and there only so that this rank computes as often as the others.
    """

    number: int
    size: int
    data: Any
    skipped: tuple[str, ...] = ()
    is_filler: bool = False


@dataclass(frozen=True)
class GlobalBatch:
    """The samples behind one optimizer step.

    Attributes:
        begin: the cursor before this batch.
        end: the cursor after it.
        indices: the dataset indices of all samples, of all ranks, in order.
        shards: number of shards that the batch is cut into.
        parts: the shards that this rank computes, ascending; those without samples left out.
        fillers: what it computes after them where ranks talk to each other in every forward, and others have more.
    """

    begin: Cursor
    end: Cursor
    indices: Indices
    shards: int
    parts: tuple[Shard, ...]
    fillers: tuple[Shard, ...] = ()

    @property
    def size(self) -> int:
        """Samples in the batch, over all ranks."""
        return len(self.indices)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The slice of `indices` that each shard is."""
        return shard_bounds(self.size, self.shards)

    @property
    def filled(self) -> int:
        """Number of shards that have samples."""
        return min(self.shards, self.size)

    def samples_of(self, shard: int) -> list[int]:
        """The dataset indices of the samples in a shard."""
        start, stop = self.bounds[shard]
        return [int(index) for index in self.indices[start:stop]]
