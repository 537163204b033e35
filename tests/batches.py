"""Global batches out of tensors, without a loader."""

from typing import Any

import numpy
import torch

import samestep
from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch, Shard
from samestep.sharding import owned_shards, shard_bounds

FIRST_SAMPLE = 100  # so that a sample's index is not its place in the batch


def batch_of(world: samestep.World, inputs: Any, targets: torch.Tensor, shards: int) -> GlobalBatch:
    """What `world`'s rank sees of the batch `(inputs, targets)`; samples are numbered from FIRST_SAMPLE."""
    size = len(targets)
    bounds = shard_bounds(size, shards)
    parts = tuple(
        Shard(number, stop - start, (inputs[start:stop], targets[start:stop]))
        for number in owned_shards(shards, world.size, world.rank)
        for start, stop in [bounds[number]]
        if start < stop
    )
    indices = numpy.arange(FIRST_SAMPLE, FIRST_SAMPLE + size)
    return GlobalBatch(Cursor(), Cursor(0, size), indices, shards, parts)


def random_batch(
    world: samestep.World, size: int, shards: int, *, features: int = 6, classes: int = 4, seed: int = 0
) -> GlobalBatch:
    """A batch of float64 features and class numbers."""
    return batch_of(world, *random_data(size, features=features, classes=classes, seed=seed), shards)


def random_data(size: int, *, features: int = 6, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 features and class numbers."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (size,), generator=generator)
