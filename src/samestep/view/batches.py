"""Exchange of batches that each rank reads in part."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

import torch

from samestep.data.own_rows import Bounds
from samestep.data.sample_reader import Decision
from samestep.view.actions import Action
from samestep.view.crossings import RowBounds
from samestep.view.ranks import MOST_MICROBATCHES, Slices, rank_bounds
from samestep.view.rows import rows_of
from samestep.view.view import View


class ViewOfBatches:
    """Ranks of a view, for the batches of one loader (`data/own_rows.BatchRanks`).

    Args:
        view: the view.
        microbatches: slices of a batch, of which each rank owns equally many; None: the rows of the
            first batch with a row for each rank, at most 8, as for calls of a module.
    """

    def __init__(self, view: View, microbatches: int | None = None) -> None:
        self.rank = view.ranks.rank
        self.size = view.ranks.size
        self._view = view
        self._microbatches = microbatches

    def can_send(self) -> bool:
        """Whether this point of the program is one that all ranks reach."""
        return self._view.exchanges_here()

    def bounds(self, rows: int) -> Bounds | None:
        """Return the own rows of each rank in a batch; None if a rank would have none."""
        if rows < self.size:
            return None
        if self._microbatches is None:
            self._microbatches = min(rows, MOST_MICROBATCHES)
        bounds = rank_bounds(rows, self._microbatches, self._view.ranks.shares)
        if any(start == stop for start, stop in bounds):
            return None
        return bounds

    def word(self, samples: int, *fields: int) -> list[list[int]]:
        """Return the integers of all ranks, of which each is at a batch; `samples` must be equal on all of them.

        Raises:
            RankDesyncError: another rank is not.
            RankMismatchError: something that must be equal differs between ranks.
        """
        self._view.in_step.fact_of_samples(samples)
        words = self._view.word(Action.BATCH, samples, *fields)
        self._view.require_same_action(words)
        return [word[2:] for word in words]

    def gather(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return the rows of all ranks."""
        return self._view.ranks.gather_rows([own], bounds, factor)

    def rows(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return a tensor with the whole shape, of the own rows."""
        if not self._view.keeps_rows:
            return self.gather(own, bounds, factor)
        slices = Slices(bounds, self.size, self.rank)
        return rows_of(
            own, RowBounds(self._view.row_messages(), slices, factor), self._view.batch_limit
        )

    def decisions_of(
        self, dataset: Any, collate: Any, line: Hashable
    ) -> tuple[MutableMapping[Hashable, Decision], Hashable]:
        """Return the decisions of earlier loaders, and the key of a loader that a line of the script has made.

        Decisions belong to the data set. Functions that the line makes again are distinguished by
        their code.
        """
        try:
            decisions = self._view.batch_decisions.setdefault(dataset, {})
            key = (getattr(collate, "__code__", collate), line)
            hash(key)
        except TypeError:  # a list as data set
            return {}, None
        return decisions, key
