"""Loaders of global batches with the options of torch's `DataLoader`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from samestep.data.loader import Loader
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.microbatches import Microbatches

integration_error = partial(InputError, code="E_INTEGRATION")


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

    Args:
        loader: a loader of torch, which is not iterated.
        world: the ranks.
        seed: seed of order and augmentation.
        batch_size: samples of a global batch; None for the batch size of `loader`.
        microbatches: slices of a global batch.
        batch_sampler: used in place of the batch sampler of `loader`.

    Raises:
        InputError: the loader has no batches, no length, or a sampler that divides the data among ranks.
    """
    _require_default_workers(loader)
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
        raise integration_error(
            "a DataLoader with batch_size=None, which does not form batches",
            "batches of a dataset with one sample per index",
            "DataLoader(dataset, batch_size=64), with the samples of a global batch",
        )
    elif type(batch_sampler) is not BatchSampler:
        if batch_size is not None:
            raise integration_error(
                f"a global batch size of {batch_size} for a DataLoader with the batch sampler "
                f"{type(batch_sampler).__name__}",
                "global batches of the batch sampler, or a batch size",
                "leave out the global batch size: each list of the batch sampler is a global batch",
            )
        options["batch_sampler"] = batch_sampler
    else:
        options |= {"batch_size": batch_size or batch_sampler.batch_size, "drop_last": batch_sampler.drop_last}
        options |= order_options(batch_sampler.sampler)
    dataset: Any = loader.dataset
    return Loader(dataset, world=world, seed=seed, microbatches=microbatches, **options)


def _require_default_workers(loader: DataLoader[Any]) -> None:
    ignored = {
        "timeout": loader.timeout != 0,
        "multiprocessing_context": loader.multiprocessing_context is not None,
        "in_order": not loader.in_order,
    }
    for name in (name for name, is_set in ignored.items() if is_set):
        raise integration_error(
            f"DataLoader({name}={getattr(loader, name)!r})", "workers of Samestep's loader", f"leave out {name}"
        )


def order_options(sampler: Any) -> dict[str, Any]:
    """Return the options of a `Loader` for the order of a sampler of torch."""
    if type(sampler) is SequentialSampler:
        return {}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return {"shuffle": True}
    return {"sampler": sampler}
