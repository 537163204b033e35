"""Hashes of some samples of the first batch, which a resumption compares with the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from samestep.data.batch_structure import content_of
from samestep.data.sample_reader import (
    Request,
    SampleReader,
    Samples,
    as_it_is,
    init_worker,
    raise_failure,
)

_SAMPLES = 8  # of the first batch


def hashes_of_batch(request: Request, read: Samples) -> dict[str, Any]:
    """Return hashes of up to `_SAMPLES` samples of a batch, and the facts that they depend on."""
    repeats = request.repeats or [0] * len(request.indices)
    # Indices that JSON keeps, at their first occurrence: a probe has no repeats.
    numbers = [
        number
        for number in range(len(read.samples))
        if type(request.indices[number]) in (int, str) and not repeats[number]
    ]
    numbers = numbers[:: max(1, math.ceil(len(numbers) / _SAMPLES))]
    return {
        "seed": request.seed,
        "epoch": request.epoch,
        "draws": request.draws,
        "indices": [request.indices[number] for number in numbers],
        "hashes": [content_of(read.samples[number]) for number in numbers],
    }


def changed_samples(
    loader: DataLoader[Any], probe: Mapping[str, Any], *, sets_epoch: bool
) -> list[Any]:
    """Return the indices of samples with other contents now.

    Args:
        loader: loader of the data set.
        probe: result of `hashes_of_batch`.
        sets_epoch: whether the data set is told the epoch.
    """
    indices = probe["indices"]
    request = Request("probe", indices, None, probe["seed"], probe["epoch"], probe["draws"])
    reader = SampleReader(loader.dataset, loader.collate_fn, sets_epoch=sets_epoch)
    # In a worker as other samples: a file that a data set opens once cannot be shared with it.
    options: dict[str, Any] = {}
    if loader.num_workers:
        options = {
            "num_workers": 1,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": partial(init_worker, loader.dataset, loader.worker_init_fn),
        }
    requests: Any = [request]
    readings: DataLoader[Any] = DataLoader(
        reader,
        batch_sampler=requests,
        collate_fn=as_it_is,
        generator=torch.Generator(),
        **options,
    )
    reading = next(iter(readings))
    if reading.failure is not None:
        raise_failure(reading.failure)
    pairs = zip(indices, probe["hashes"], reading.data, strict=True)
    return [index for index, before, now in pairs if before != now]
