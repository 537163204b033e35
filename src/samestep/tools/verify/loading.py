"""Observation of the loaders of a script: each batch as the script gets it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.data.whole_batches import WholeBatches

AddBatch = Callable[..., None]


class _Reading:
    """Whether a loader of Samestep reads by one of torch, whose batches are then not those of the script."""

    is_active = False


def observe_loaders(add_batch: AddBatch) -> None:
    """Call `add_batch(indices, data, is_last=...)` for each batch of a loader; permanent."""
    reading = _Reading()
    _observe_torch(add_batch, reading)
    whole = WholeBatches.__iter__

    def observed(self: Any) -> Iterator[Any]:
        batches = whole(self)
        while True:
            epoch = self.cursor.epoch
            reading.is_active = True
            try:
                data = next(batches, None)
            finally:
                reading.is_active = False
            if data is None:
                return
            add_batch(None, data, is_last=self.cursor.epoch != epoch)
            yield data

    WholeBatches.__iter__ = observed  # type: ignore[method-assign]


def _observe_torch(add_batch: AddBatch, reading: _Reading) -> None:
    """Observe the iterators of torch's `DataLoader`, which ask for indices in the order of their batches."""
    next_index: Callable[..., Any] = _BaseDataLoaderIter._next_index
    next_batch: Callable[..., Any] = _BaseDataLoaderIter.__next__
    reset: Callable[..., Any] = _BaseDataLoaderIter._reset

    def observed_reset(self: Any, *arguments: Any, **options: Any) -> None:
        self._samestep_indices = deque()
        reset(self, *arguments, **options)

    def observed_index(self: Any) -> Any:
        indices = next_index(self)
        waiting: deque[Any] = self.__dict__.setdefault("_samestep_indices", deque())
        waiting.append(indices)
        return indices

    def observed_batch(self: Any) -> Any:
        data = next_batch(self)
        waiting = self.__dict__.get("_samestep_indices")
        indices = waiting.popleft() if waiting else None
        if not reading.is_active:
            add_batch(_numbers(indices), data, is_last=self._num_yielded >= _length(self))
        return data

    _BaseDataLoaderIter._reset = observed_reset  # type: ignore[method-assign]
    _BaseDataLoaderIter._next_index = observed_index  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = observed_batch  # type: ignore[method-assign]


def _numbers(indices: Any) -> list[int] | None:
    """Return the indices of a batch if they are numbers."""
    listed = indices if isinstance(indices, list | tuple) else [indices]
    try:
        return [int(index) for index in listed]
    except (TypeError, ValueError):
        return None


def _length(iterator: Any) -> float:
    """Return the number of batches of an epoch; infinity if the loader does not know it."""
    try:
        return len(iterator)
    except TypeError:
        return float("inf")
