"""The dataset as the loader's workers see it: one item is one shard, with the random state of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch.utils.data

from samestep.config import BadSamples
from samestep.data.batch import Shard
from samestep.data.order import Indices
from samestep.errors import DataError, SamestepError
from samestep.runtime.random_state import derive_seed, preserved_generators, seed_generators

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """What Samestep needs of a dataset: a length, and a sample for each index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShardRequest(NamedTuple):
    """Asks for one shard of one global batch, or for something to fill its place."""

    epoch: int
    number: int
    indices: Indices
    is_filler: bool = False


class Unusable(NamedTuple):
    """Stands for a shard that could not be made; torch would turn the error into text on its way."""

    error: SamestepError


class ShardDataset(torch.utils.data.Dataset[Shard | Unusable]):
    """Makes shards of a dataset's samples.

    Python's, NumPy's and torch's generators hold a function of (seed, epoch, sample index) while a sample is
    made, and of the shard's first sample while it is collated, so augmentation written with any of them depends
    neither on workers nor on ranks.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int, bad_samples: BadSamples = "stop") -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed
        self._skips = bad_samples == "skip"

    def __getitem__(self, request: ShardRequest) -> Shard | Unusable:
        try:
            with preserved_generators():
                samples, skipped = self._samples(request)
                size = len(samples)
                if not samples:
                    samples = [self._filler(request)]
                seed_generators(derive_seed("collate", self._seed, request.epoch, int(request.indices[0])))
                data = self._collate(samples)
                if request.is_filler:  # its samples are counted where they are
                    return Shard(request.number, 0, data, is_filler=True)
                return Shard(request.number, size, data, tuple(skipped))
        except SamestepError as error:
            return Unusable(error)

    def _samples(self, request: ShardRequest) -> tuple[list[Any], list[str]]:
        """The samples that can be used, and what is wrong with the others."""
        samples, skipped = [], []
        for index in request.indices:
            try:
                samples.append(self._sample(request.epoch, int(index)))
            except DataError as error:
                if not self._skips:
                    raise
                skipped.append(str(error).splitlines()[0])
        return samples, skipped

    def _filler(self, request: ShardRequest) -> Any:
        """A sample to fill the place of a shard of which none can be used: the next one of the dataset that can.

        Which one that is does not depend on who asks, so it is the same on any number of ranks.
        """
        size, first = len(self._dataset), int(request.indices[-1])
        for step in range(1, size):
            with suppress(DataError):  # this one cannot be used either
                return self._sample(request.epoch, (first + step) % size)
        raise DataError(
            f"none of the {size} samples can be used",
            rule="a dataset has samples",
            do="look at what bad_samples=stop says of the first",
        )

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(derive_seed("sample", self._seed, epoch, index))
        try:
            return self._dataset[index]
        except SamestepError:
            raise  # it names what it is about
        except Exception as error:
            error.add_note(f"while sample {index} of the dataset was made")
            raise


class RequestQueue(torch.utils.data.Sampler[ShardRequest]):
    """The requests of the pass that begins next; workers stay the same from pass to pass."""

    def __init__(self) -> None:
        self.requests: list[ShardRequest] = []

    def __iter__(self) -> Iterator[ShardRequest]:
        return iter(self.requests)
