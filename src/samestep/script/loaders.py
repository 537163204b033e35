"""Loaders of a script for one device: each rank reads its own rows of every `DataLoader`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.data.own_rows import BatchRanks, OwnRows, own_iterator
from samestep.distributed.collective_check import script_line
from samestep.script.patches import replaced
from samestep.script.summary import Reading


@contextmanager
def own_rows_of_loaders(
    ranks: Callable[[], BatchRanks | None],
) -> Iterator[Mapping[Hashable, Reading]]:
    """Let each rank read its own rows of the batches of every `DataLoader`, during the block.

    Batches are those of torch, with one exception: random numbers of a data set are a function of
    the epoch and the index of the sample, on one process too.

    Args:
        ranks: returns the ranks that read the batches of one loader together.

    Yields:
        How the script's loaders read, one entry for each data set and line that iterates.
    """
    readings: dict[Hashable, Reading] = {}
    # Weak: a script can make a loader in each epoch.
    states: weakref.WeakKeyDictionary[DataLoader[Any], OwnRows] = weakref.WeakKeyDictionary()

    def iterator(loader: DataLoader[Any]) -> _BaseDataLoaderIter:
        state = states.get(loader)
        if state is None:
            together = ranks()
            state = states[loader] = OwnRows(together)
            line = script_line(sys._getframe(2))
            name = type(loader.dataset).__name__
            key = (name, line, id(loader.dataset))  # one line may read data sets by turns
            if key in readings:  # the loader is made again in each epoch
                state.samples = readings[key].state.samples
            readings[key] = Reading(name, line, state)
            if together is not None:
                state.decisions, state.key = together.decisions_of(
                    loader.dataset, loader.collate_fn, line
                )
        return own_iterator(loader, state)

    with replaced(DataLoader, _get_iterator=iterator):
        yield readings
