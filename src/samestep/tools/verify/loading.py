"""Observation of the loaders of a script: each batch as the script receives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.data.own_rows import _OwnRowsIterator


def observe_loaders(add_batch: Callable[..., None]) -> None:
    """Call `add_batch(indices, data, is_last=...)` for each batch of a loader of torch or Samestep; permanent.

    Iterators of torch ask for indices in the order of their batches, also ahead for workers. Those
    of Samestep read own rows and complete them to batches.
    """
    next_index: Callable[..., Any] = _BaseDataLoaderIter._next_index
    next_batch: Callable[..., Any] = _BaseDataLoaderIter.__next__
    next_whole: Callable[..., Any] = _OwnRowsIterator.__next__
    reset: Callable[..., Any] = _BaseDataLoaderIter._reset

    def add(iterator: Any, data: Any) -> None:
        add_batch(
            _numbers(iterator._read_indices),
            data,
            is_last=iterator._num_yielded >= _length(iterator),
        )

    def observed_reset(self: Any, *arguments: Any, **options: Any) -> None:
        self._asked_indices = deque()
        reset(self, *arguments, **options)

    def observed_index(self: Any) -> Any:
        indices = next_index(self)
        self.__dict__.setdefault("_asked_indices", deque()).append(indices)
        return indices

    def observed_batch(self: Any) -> Any:
        data = next_batch(self)
        asked = self.__dict__.get("_asked_indices")
        self._read_indices = asked.popleft() if asked else None
        if not isinstance(self, _OwnRowsIterator):
            add(self, data)
        return data

    def observed_whole(self: Any) -> Any:
        is_nested = self.__dict__.get(
            "_is_observed", False
        )  # after a batch without a usable sample
        self._is_observed = True
        try:
            data = next_whole(self)
        finally:
            self._is_observed = is_nested
        if not is_nested:
            add(self, data)
        return data

    _BaseDataLoaderIter._reset = observed_reset  # type: ignore[method-assign]
    _BaseDataLoaderIter._next_index = observed_index  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = observed_batch  # type: ignore[method-assign]
    _OwnRowsIterator.__next__ = observed_whole  # type: ignore[method-assign]


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
