"""Slices of a batch: which of them, and which rows, each rank owns."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.microbatches import microbatch_bounds, owned_microbatches


class Slices:
    """Slices of a batch, each of which is computed alone; a rank owns consecutive ones.

    Attributes:
        bounds: first row and row after the last of each slice.
        rows: rows of the batch.
        fewest_rows: number of rows of the smallest slice.
        own: numbers of the own slices.
        own_bounds: first row and row after the last of each own slice.
        microbatches: for each own slice its microbatches, which have random streams of their own:
            number, first row, row after the last.
        by_rank: first row and row after the last of each rank.

    Args:
        bounds: the slices, at least one for each rank.
        ranks: number of ranks.
        rank: this rank.
        copies: whether tensors of slices have memory of their own, whose alignment decides on
            kernels.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], ranks: int, rank: int, *, copies: bool = False
    ) -> None:
        self.bounds = bounds
        self.copies = copies
        self.rows = bounds[-1][1]
        self.fewest_rows = min(stop - start for start, stop in bounds)
        self.own = owned_microbatches(len(bounds), ranks, rank)
        self.own_bounds = bounds[self.own.start : self.own.stop]
        self.microbatches = [[(number, *bounds[number])] for number in self.own]
        self.by_rank = bounds
        if ranks < len(bounds):
            self.by_rank = _by_rank(bounds, ranks)


def _by_rank(bounds: Sequence[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
    spans = []
    for rank in range(ranks):
        owned = owned_microbatches(len(bounds), ranks, rank)
        span = (0, 0)
        if owned:
            span = (bounds[owned[0]][0], bounds[owned[-1]][1])
        spans.append(span)
    return spans


def rank_bounds(rows: int, microbatches: int, ranks: int) -> list[tuple[int, int]]:
    """Return the own rows of each rank, `[start, stop)`: those of its microbatches.

    Args:
        rows: rows of the batch.
        microbatches: its slices.
        ranks: number of ranks.
    """
    return _by_rank(microbatch_bounds(rows, microbatches), ranks)
