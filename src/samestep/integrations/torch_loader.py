"""Loaders of global batches with the options of torch's `DataLoader`, and their positions in checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from samestep.data.loader import Loader
from samestep.distributed.world import World
from samestep.errors import CheckpointError, InputError
from samestep.microbatches import Cursor, Microbatches

_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)


def integration_error(problem: str, fix: str) -> InputError:
    """Return the error of a use of a library that does not fit the steps of a global batch."""
    expected = "steps and evaluations of global batches, with the same result on any number of processes"
    return InputError(problem, expected, fix, code="E_INTEGRATION")


def refuse(uses: Mapping[str, tuple[object, str]]) -> None:
    """Refuse the first option, or other use of a library, whose condition is true; the text after it is the fix."""
    for problem, (is_used, fix) in uses.items():
        if is_used:
            raise integration_error(problem, fix)


def global_loader(
    loader: DataLoader[Any],
    *,
    world: World,
    seed: int,
    batch_size: int | None = None,
    microbatches: Microbatches = "auto",
    batch_sampler: Any = None,
) -> Loader:
    """Return a loader of global batches with dataset, order, collation and workers of `loader`.

    `shuffle=True` becomes the order of Samestep, a function of seed and epoch. Other samplers are drawn once per epoch.
    The initial seed of a generator of the sampler replaces `seed`, as in `Loader`.

    Args:
        loader: a loader of torch, which is not iterated.
        world: the ranks.
        seed: seed of order and augmentation.
        batch_size: samples of a global batch; None for the batch size of `loader`.
        microbatches: slices of a global batch.
        batch_sampler: used in place of the batch sampler of `loader`.
    """
    workers = {"timeout": loader.timeout != 0, "multiprocessing_context": loader.multiprocessing_context is not None}
    workers["in_order"] = not loader.in_order
    refuse({f"DataLoader({name}=...)": (is_set, f"leave out {name}") for name, is_set in workers.items()})
    _require_pure_collation(loader.collate_fn)
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    batch_sampler = loader.batch_sampler if batch_sampler is None else batch_sampler
    is_iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if is_iterable:
        options["batch_size"] = batch_size or loader.batch_size or 1  # the dataset is refused below
    elif batch_sampler is None:
        raise integration_error("a DataLoader with batch_size=None", "batch_size= with the samples of a global batch")
    elif type(batch_sampler) is not BatchSampler:
        if batch_size is not None:
            raise integration_error(
                f"a global batch size of {batch_size} for the batch sampler {type(batch_sampler).__name__}",
                "leave out the global batch size: each list of the batch sampler is a global batch",
            )
        options["batch_sampler"] = batch_sampler
    else:
        options |= {"batch_size": batch_size or batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
        options |= order_options(batch_sampler.sampler)
    dataset: Any = loader.dataset
    return Loader(dataset, world=world, seed=order_seed(batch_sampler, seed), microbatches=microbatches, **options)


def _require_pure_collation(collate: Any) -> None:
    """Refuse a collate function with a seed or a generator of its own.

    Its random numbers would depend on the microbatches that this process, or one of its workers, has collated before.
    """
    while isinstance(collate, partial) or hasattr(collate, "data_collator"):  # a wrapper of Transformers
        collate = collate.func if isinstance(collate, partial) else collate.data_collator
    is_method = isinstance(collate, MethodType)
    owner = collate.__self__ if is_method else collate
    names = [
        name
        for name, value in getattr(owner, "__dict__", {}).items()
        if isinstance(value, _GENERATORS) or (name == "seed" and value is not None)
    ]
    if is_method:  # the owner, such as a data module, can use them for its splits
        used = getattr(collate, "__code__", None)
        names = [name for name in names if used is None or name in used.co_names]
    if names:
        raise integration_error(
            f"the collate function {type(owner).__name__} with its own {names[0]}",
            f"leave {names[0]} out; the seed of the training decides the random numbers of collation",
        )


def order_seed(batch_sampler: Any, seed: int) -> int:
    """Return the initial seed of the generator of a batch sampler or of its sampler; `seed` without a generator."""
    for sampler in (batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return seed


def order_options(sampler: Any) -> dict[str, Any]:
    """Return the options of a `Loader` for the order of a sampler of torch."""
    if type(sampler) is SequentialSampler:
        return {}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return {"shuffle": True}
    return {"sampler": sampler}


def position_of(loader: Loader) -> dict[str, Any]:
    """Return the position of a loader for a checkpoint, with the settings on which its batches depend."""
    cursor = loader.cursor
    return {"epoch": cursor.epoch, "samples": cursor.samples, "settings": loader.settings_of(cursor.epoch)}


def restore_position(loader: Loader, position: Mapping[str, Any]) -> None:
    """Move a loader to the position of a checkpoint.

    Raises:
        CheckpointError: the data or their batches are others than those of the checkpoint.
    """
    require_same_data(loader, position["settings"], position["epoch"])
    loader.cursor = Cursor(position["epoch"], position["samples"])


def require_same_data(loader: Loader, saved: Mapping[str, Any], epoch: int = 0) -> None:
    """Compare the settings of the data of a checkpoint with those of a loader.

    Raises:
        CheckpointError: a setting differs.
    """
    saved, settings = loader.adopt(saved), loader.settings_of(epoch)
    changed = [
        f"{name} was {saved.get(name)} and is {settings[name]}"
        for name in settings
        if settings[name] != saved.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"the training data differ from those of the checkpoint: {', '.join(changed)}",
            expected="the same data, global batch size, microbatches and seed; only the processes may differ",
            fix="use the options of the run that wrote the checkpoint, or load the weights alone",
            code="E_RESUME_CHANGED",
        )
