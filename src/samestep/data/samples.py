"""The dataset as the loader's workers see it: one item is one shard, with the random state of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch.utils.data

from samestep.data.batch import Shard
from samestep.data.order import Indices
from samestep.errors import SamestepError
from samestep.runtime.random_state import derive_seed, preserved_generators, seed_generators

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """What Samestep needs of a dataset: a length, and a sample for each index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShardRequest(NamedTuple):
    """Asks for one shard of one global batch."""

    epoch: int
    number: int
    indices: Indices


class Unusable(NamedTuple):
    """Stands for a shard that could not be made; torch would turn the error into text on its way."""

    error: SamestepError


class ShardDataset(torch.utils.data.Dataset[Shard | Unusable]):
    """Makes shards of a dataset's samples.

    Python's, NumPy's and torch's generators hold a function of (seed, epoch, sample index) while a sample is
    made, and of the shard's first sample while it is collated, so augmentation written with any of them depends
    neither on workers nor on ranks.
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, request: ShardRequest) -> Shard | Unusable:
        samples = []
        try:
            with preserved_generators():
                for index in request.indices:
                    samples.append(self._sample(request.epoch, int(index)))
                seed_generators(derive_seed("collate", self._seed, request.epoch, int(request.indices[0])))
                return Shard(request.number, len(samples), self._collate(samples))
        except SamestepError as error:
            return Unusable(error)

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
