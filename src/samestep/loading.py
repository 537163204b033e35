"""`samestep.loader`: whole batches, of which each rank reads its own rows."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from samestep.data.batch import SizedDataset
from samestep.data.whole_batches import WholeBatches, whole_batches
from samestep.distributed.collective_check import script_line
from samestep.distributed.env import read_rank_place
from samestep.errors import InputError
from samestep.global_view import joined_view
from samestep.launcher.process_state import process_state
from samestep.view.view import ViewOfBatches

# Not from the signature of `DataLoader`: an argument that a later torch adds must be refused, not
# ignored.
_LOADER_DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "shuffle": None,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "collate_fn": None,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "in_order": True,
    "seed": None,
    "lengths": None,
}


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
    # Not strict: most calls have fewer arguments, and surplus ones are refused below.
    named = {**dict(zip(_LOADER_DEFAULTS, arguments, strict=False)), **options}
    twice = [name for name, _ in zip(_LOADER_DEFAULTS, arguments, strict=False) if name in options]
    if twice:
        raise InputError(
            f"samestep.loader received {twice[0]} by position and by name",
            expected="each argument once",
            fix=f"leave {twice[0]}= out",
            code="E_LOADER",
        )
    unknown = [name for name in named if name not in _LOADER_DEFAULTS]
    if len(arguments) > len(_LOADER_DEFAULTS):
        unknown.append(f"number {len(arguments)}")
    if unknown:
        raise InputError(
            f"samestep.loader has no argument {unknown[0]}",
            expected=f"arguments of torch's DataLoader: {', '.join(_LOADER_DEFAULTS)}",
            fix="leave it out",
            code="E_LOADER",
        )
    if named and isinstance(dataset, DataLoader):
        raise InputError(
            f"samestep.loader received a DataLoader and {next(iter(named))}",
            expected="a DataLoader alone, or a data set with arguments",
            fix="give the argument to the DataLoader",
            code="E_LOADER",
        )
    every = {**_LOADER_DEFAULTS, **named}
    return whole_batches(dataset, every, _batch_ranks, script_line(sys._getframe(1)))


def _batch_ranks() -> ViewOfBatches | None:
    """Return the ranks that read batches together, or None on one process."""
    if process_state.view is None and process_state.world is None:
        is_alone = process_state.worker is None and read_rank_place() is None
        if is_alone or dist.is_initialized():  # or a group of the script, or of `samestep.init`
            return None
    view = joined_view(None, "fast")
    if view.ranks.size > 1:
        return ViewOfBatches(view)
    return None
