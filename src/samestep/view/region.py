"""Slice of a divided call: its rows, and its exchange with other slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from samestep.reduce.fast import Sums

Parts = Sequence[torch.Tensor]
# From sums over all slices and a value of each slice that is computed here: a result for each.
Joined = Callable[[Sums, list[Any]], list[Any]]


class Exchange(Protocol):
    """Communication of a slice with all others, which call the same methods equally often."""

    def join(self, compute: Joined, value: Any) -> Any:
        """Return the result for this slice of `compute`, which runs once for all slices here.

        Args:
            compute: makes nodes of the graph that all these slices share.
            value: value of this slice.
        """
        ...


@dataclass
class Region:
    """Rows of one divided call that are computed here.

    Attributes:
        rows: rows of the whole batch.
        start: first own row.
        stop: first row after the own rows.
        exchange: communication with the slices of the other rows.
        draw_factors: for each random draw of the call, in order: numbers per row in the first
            dimension, or None if the first dimension does not depend on the number of rows.
        microbatches: slices of the own rows with random streams of their own.
        seed: seed of the draws as a function of (seed, draw, microbatch); None for the script's own
            stream.
        positions: numbers of the draws by the state of the script's stream, which then advances at
            each; None if no part is computed again. Checkpoints restore that state, and so find the
            number of a draw.
        is_recomputed: whether this is a recomputation, which finds its draws in `positions`.
        local_batch_norm: batch norm uses the statistics of the own rows.
        shared_statistics: identities of running statistics that another slice of this process
            updates.
    """

    rows: int
    start: int
    stop: int
    exchange: Exchange
    draw_factors: Sequence[int | None]
    microbatches: Sequence[tuple[int, int, int]] = ()  # number, first row, first row after
    seed: int | None = None
    positions: dict[bytes, int] | None = None
    is_recomputed: bool = False
    local_batch_norm: bool = False
    shared_statistics: frozenset[int] = frozenset()

    @property
    def own(self) -> int:
        """Number of own rows."""
        return self.stop - self.start


_current: ContextVar[Region | None] = ContextVar("region", default=None)  # other threads have none


def current_region() -> Region | None:
    """Return the region that this thread computes, or None outside of divided calls."""
    return _current.get()


@contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Make `region` the current one in this thread."""
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)
