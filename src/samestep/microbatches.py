"""Division of batches into microbatches and slices, and the ranks that own them."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.errors import InputError
from samestep.number_text import plural

MOST_MICROBATCHES = 8  # of a batch, where neither script nor recipe gives a number


def default_microbatches(rows: int) -> int:
    """Return the number of microbatches of a batch, where neither script nor recipe gives one."""
    return min(rows, MOST_MICROBATCHES)


def microbatch_bounds(size: int, microbatches: int) -> list[tuple[int, int]]:
    """Return one slice `[start, stop)` of a global batch of `size` samples per microbatch.

    Sizes differ by at most one. A batch smaller than `microbatches` has empty microbatches, which
    do not take part in the step.
    """
    # A function of the batch alone, so that microbatches do not depend on ranks.
    return [(size * v // microbatches, size * (v + 1) // microbatches) for v in range(microbatches)]


def owned_microbatches(microbatches: int, ranks: int, rank: int) -> range:
    """Return the microbatches of one of some ranks: `[V*r//R, V*(r+1)//R)`."""
    # Consecutive ones: sums of a rank are subtrees of the tree of `reduce/exact.py`.
    return range(microbatches * rank // ranks, microbatches * (rank + 1) // ranks)


def require_microbatches(microbatches: int | None, ranks: int, *, ranks_per_model: int = 1) -> None:
    """Require a microbatch for each of the ranks, or groups of ranks with one model.

    Args:
        microbatches: their number; None: the script gives none.
        ranks: number of ranks, or groups, that share the data.
        ranks_per_model: ranks of a group.

    Raises:
        InputError: a rank would have no microbatch.
    """
    # An upper limit: the first call may fix fewer, and is then checked again.
    number = MOST_MICROBATCHES if microbatches is None else microbatches
    if number < ranks:
        raise InputError(
            f"{ranks} ranks share the data but there are {plural(number, 'microbatch')}",
            expected="ranks that share the data <= microbatches: each computes at least one",
            fix=f"--processes {number * ranks_per_model}; or microbatches={ranks} or more, "
            "on every number of processes",
            code="E_TOO_MANY_RANKS",
        )


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
        # Of a rank without microbatches; callers do not divide such a batch.
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
