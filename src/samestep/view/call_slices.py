"""Rows of the batch of a call, and the slices into which the call is divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from samestep.microbatches import (
    Slices,
    default_microbatches,
    microbatch_bounds,
    owned_microbatches,
    rank_bounds,
    require_microbatches,
)
from samestep.view.strategy import Strategy


def rows_of_batch(leaves: Iterable[Any]) -> int:
    """Return the rows of the first tensor with a dimension among the arguments of a call."""
    # The first tensor decides; a trial finds the leaves that have the same rows.
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return next((leaf.shape[0] for leaf in tensors), 0)


class CallSlices:
    """Slices of the calls of one module.

    Attributes:
        microbatches: slices of a batch; the first call with enough rows decides if it is None.

    Args:
        strategy: strategy of the module.
        microbatches: see above.
    """

    def __init__(self, strategy: Strategy, microbatches: int | None) -> None:
        self.microbatches = microbatches
        self._strategy = strategy
        # Each microbatch is a slice, otherwise the rows of each rank.
        self._is_by_microbatch = strategy.is_exact or strategy.has_stages
        # The reduction of several own slices needs the number of microbatches.
        self._has_reduction = not self._is_by_microbatch
        self._last: Slices | None = None

    def of_rows(self, rows: int) -> Slices | None:
        """Return the slices of a batch, or None if one would have no row.

        Raises:
            InputError: under `exact`, there are more ranks than microbatches.
        """
        # Most batches of a loop have one size.
        if self._last is None or self._last.rows != rows:
            if self._is_by_microbatch:
                self._last = self._by_microbatch(rows)
            else:
                self._last = self._by_rank(rows)
        return self._last

    def _by_rank(self, rows: int) -> Slices | None:
        ranks = self._strategy.ranks
        # First: such a call must not decide on the number of microbatches.
        if rows < ranks.size:
            return None
        if self.microbatches is None:
            self.microbatches = default_microbatches(rows)
        bounds = microbatch_bounds(rows, self.microbatches)
        owned = owned_microbatches(self.microbatches, ranks.size, ranks.rank)
        slices = Slices(rank_bounds(rows, self.microbatches, ranks.size), ranks.size, ranks.rank)
        # Random streams belong to microbatches, never to ranks.
        slices.microbatches = [[(number, *bounds[number]) for number in owned]]
        return slices if slices.fewest_rows else None

    def _by_microbatch(self, rows: int) -> Slices | None:
        ranks = self._strategy.ranks
        if rows < 2 or rows < (self.microbatches or 0):
            return None
        if self.microbatches is None:
            self.microbatches = default_microbatches(rows)
            if not self._strategy.is_exact:
                # Several rows of each: small matrix products take as long as larger ones.
                self.microbatches = default_microbatches(max(rows // 2, ranks.size))
            require_microbatches(self.microbatches, ranks.size)
        bounds = microbatch_bounds(rows, self.microbatches)
        slices = Slices(bounds, ranks.size, ranks.rank, copies=self._strategy.is_exact)
        if not self._has_reduction:
            self._strategy.sum_slices(slices)
            self._has_reduction = True
        return slices
