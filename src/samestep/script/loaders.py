"""Own rows of the batches that a script reads with torch's `DataLoader`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.data.own_rows import BatchRanks, OwnRows, own_iterator
from samestep.view.fingerprints import script_line


@contextmanager
def own_rows_of_loaders(ranks: Callable[[], BatchRanks | None]) -> Iterator[None]:
    """Let each rank read its own rows of the batches of every `DataLoader`, during the block.

    Batches are those of torch, with one exception: random numbers of a data set are a function of the epoch and the
    index of the sample, on one process too. `ranks` returns the ranks that read the batches of one loader together.
    """
    of_torch = DataLoader._get_iterator
    states: weakref.WeakKeyDictionary[DataLoader[Any], OwnRows] = weakref.WeakKeyDictionary()

    def iterator(loader: DataLoader[Any]) -> _BaseDataLoaderIter:
        state = states.get(loader)
        if state is None:
            together = ranks()
            state = states[loader] = OwnRows(together)
            if together is not None:
                line = script_line(sys._getframe(2))
                state.decisions, state.key = together.decisions_of(loader.dataset, loader.collate_fn, line)
        return own_iterator(loader, state)

    DataLoader._get_iterator = iterator  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataLoader._get_iterator = of_torch  # type: ignore[method-assign]
