"""Global batches from tensors, without a loader."""

from typing import Any

import numpy
import torch

import samestep
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.microbatches import Cursor, microbatch_bounds, owned_microbatches

FIRST_SAMPLE = 100  # indices of samples differ from their positions in the batch


def batch_of(world: samestep.World, inputs: Any, targets: torch.Tensor, microbatches: int) -> GlobalBatch:
    """Return the batch `(inputs, targets)` as seen by this rank; sample indices start at `FIRST_SAMPLE`."""
    size = len(targets)
    bounds = microbatch_bounds(size, microbatches)
    parts = tuple(
        Microbatch(number, stop - start, (inputs[start:stop], targets[start:stop]))
        for number in owned_microbatches(microbatches, world.size, world.rank)
        for start, stop in [bounds[number]]
        if start < stop
    )
    indices = numpy.arange(FIRST_SAMPLE, FIRST_SAMPLE + size)
    return GlobalBatch(Cursor(), Cursor(0, size), indices, microbatches, parts)


def random_batch(
    world: samestep.World, size: int, microbatches: int, *, features: int = 6, classes: int = 4, seed: int = 0
) -> GlobalBatch:
    """Return a batch of random float64 features and classes."""
    return batch_of(world, *random_data(size, features=features, classes=classes, seed=seed), microbatches)


def random_data(size: int, *, features: int = 6, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random float64 features and classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, features, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (size,), generator=generator)
