"""Batches of recipes: data with the indices of its samples, without samples that cannot be used."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import torch

from samestep.cursor import Cursor
from samestep.data.batch import Collate, SizedDataset, map_tensors
from samestep.data.whole_batches import WholeBatches
from samestep.errors import DataError
from samestep.microbatches import microbatch_bounds


class _Unusable(NamedTuple):
    """Error line of a sample, in its place."""

    text: str


class RecipeBatch(NamedTuple):
    """A whole batch.

    Attributes:
        data: output of the collate function; None if no sample of the batch can be used.
        samples: indices of the samples in the data set, shape (samples,).
        skipped: one error line per sample that was left out.
    """

    data: Any
    samples: torch.Tensor
    skipped: list[str]


class IndexedSamples:
    """Data set of pairs of index and sample.

    Args:
        dataset: data set of a recipe; its `set_epoch` is that of this object.
        skips: whether a sample that cannot be used is replaced by its error line; otherwise the
            error is raised.
    """

    def __init__(self, dataset: SizedDataset, *, skips: bool) -> None:
        self._dataset = dataset
        self._skips = skips
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        try:
            return index, self._dataset[index]
        except DataError as error:
            if not self._skips:
                raise
            return index, _Unusable(error.value)


def collate_usable(samples: list[tuple[int, Any]], collate: Collate) -> RecipeBatch:
    """Return the batch of the usable samples of `IndexedSamples`."""
    usable = [(index, sample) for index, sample in samples if not isinstance(sample, _Unusable)]
    data = collate([sample for _, sample in usable]) if usable else None
    skipped = [sample.text for _, sample in samples if isinstance(sample, _Unusable)]
    # With a type: an empty list would be float32.
    indices = torch.tensor([index for index, _ in usable], dtype=torch.int64)
    return RecipeBatch(data, indices, skipped)


def parts_of(data: Any, samples: int, parts: int) -> list[Any]:
    """Return consecutive parts of nested data with rows for samples.

    There are fewer than `parts` for fewer samples. Values without a row for each sample are in
    every part.
    """
    if parts == 1:
        return [data]

    def rows(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if not tensor.dim() or not len(tensor) or len(tensor) % samples:
            return tensor
        factor = len(tensor) // samples  # rows of a sample
        return tensor[start * factor : stop * factor]

    bounds = microbatch_bounds(samples, min(parts, samples))
    return [map_tensors(data, partial(rows, start=start, stop=stop)) for start, stop in bounds]


def complete_epoch(batches: WholeBatches) -> Generator[RecipeBatch]:
    """Yield all batches of the first epoch, for an evaluation."""
    # Draws of a sample depend on the epoch: every evaluation has the same.
    batches.cursor = Cursor()
    yield from batches
