"""`samestep.loader`: whole batches, of which each rank reads its own rows."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from samestep.data.batch import SizedDataset
from samestep.data.loader_arguments import loader_arguments
from samestep.data.whole_batches import WholeBatches, whole_batches
from samestep.distributed.collective_check import script_line
from samestep.distributed.env import read_rank_place
from samestep.launcher.process_state import process_state
from samestep.parallelize import joined_view
from samestep.view.view import View, ViewOfBatches


def loader(
    dataset: SizedDataset | DataLoader[Any], *arguments: Any, **options: Any
) -> WholeBatches:
    """Return an iterable over the whole batches of an epoch, of which ranks read their own rows.

    With a data set and the arguments of torch's `DataLoader`, the order is a function of (seed,
    epoch), and a run resumes at any batch at the same cost. With a `DataLoader`, the order is that
    of its samplers. Each iteration is an epoch. See `WholeBatches`.

    Args:
        dataset: data set, or a `DataLoader` of torch, which stays as it is.
        arguments: positional arguments of `DataLoader`, from `batch_size` on.
        options: keyword arguments of `DataLoader`. With a data set also:
            `seed`: seed of order and random numbers, 0 if omitted; a `generator` gives its initial
                seed.
            `lengths`: one length per sample; samples of similar length share a batch, to reduce
                padding.
            A sampler belongs to a `DataLoader`.

    Raises:
        InputError: an argument is invalid, or arguments do not fit together.
        DataError: the data set is empty.
    """
    every = loader_arguments(dataset, arguments, options)
    return whole_batches(dataset, every, _batch_ranks, script_line(sys._getframe(1)))


def _batch_ranks() -> ViewOfBatches | None:
    """Return the ranks that read batches together, or None on one process."""
    if process_state.view is None and process_state.world is None:
        is_alone = process_state.worker is None and read_rank_place() is None
        if is_alone or dist.is_initialized():  # or a group of the script, or of `samestep.init`
            return None
    return ranks_of_batches(joined_view(None, "fast"))


def ranks_of_batches(view: View) -> ViewOfBatches | None:
    """Return the ranks of a view that read batches together, or None on one process."""
    if view.ranks.size > 1:
        return ViewOfBatches(view)
    return None
