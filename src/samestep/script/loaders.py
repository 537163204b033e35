"""Own rows of the batches that a script reads with torch's `DataLoader`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.data.own_rows import BatchRanks, OwnRows, own_iterator
from samestep.view.fingerprints import script_line


@dataclass
class Reading:
    """How the loaders of one line of the script read.

    Attributes:
        dataset: class of the data set.
        state: state of the loaders.
    """

    dataset: str
    state: OwnRows

    def lines(self) -> Iterator[str]:
        """Yield lines for the summary."""
        decision = self.state.decision
        if decision is None:
            return
        if self.state.ranks is not None and decision.how != "own":
            yield f"{self.dataset}: batches read whole on every process: {decision.reason}"
        elif self.state.ranks is not None:
            yield f"{self.dataset}: each process reads its own samples"
        if decision.draws:
            yield (
                f"{self.dataset} draws random numbers: those of a sample depend on the epoch and its index, equal on "
                "every number of processes, and are not those of plain Python"
            )


@contextmanager
def own_rows_of_loaders(ranks: Callable[[], BatchRanks | None]) -> Iterator[Mapping[Hashable, Reading]]:
    """Let each rank read its own rows of the batches of every `DataLoader`, during the block.

    Batches are those of torch, with one exception: random numbers of a data set are a function of the epoch and the
    index of the sample, on one process too.

    Args:
        ranks: returns the ranks that read the batches of one loader together.

    Yields:
        How the script's loaders read, one entry for each data set and line that iterates.
    """
    readings: dict[Hashable, Reading] = {}
    of_torch = DataLoader._get_iterator
    states: weakref.WeakKeyDictionary[DataLoader[Any], OwnRows] = weakref.WeakKeyDictionary()

    def iterator(loader: DataLoader[Any]) -> _BaseDataLoaderIter:
        state = states.get(loader)
        if state is None:
            together = ranks()
            state = states[loader] = OwnRows(together)
            line = script_line(sys._getframe(2))
            name = type(loader.dataset).__name__
            readings[name, line, id(loader.dataset)] = Reading(name, state)  # one line may read data sets by turns
            if together is not None:
                state.decisions, state.key = together.decisions_of(loader.dataset, loader.collate_fn, line)
        return own_iterator(loader, state)

    DataLoader._get_iterator = iterator  # type: ignore[method-assign, assignment]
    try:
        yield readings
    finally:
        DataLoader._get_iterator = of_torch  # type: ignore[method-assign]
