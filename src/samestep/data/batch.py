"""Global batches and microbatches, and transfer of their tensors to devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from samestep.data.order import Indices
from samestep.microbatches import Cursor, microbatch_bounds


class Microbatch(NamedTuple):
    """One microbatch with its data."""

    number: int  # index among the microbatches of the global batch, from 0
    size: int  # number of usable samples; 0 if none is usable, and `data` then holds a substitute sample
    data: Any  # output of the collate function; the engine expects a pair `(inputs, targets)`
    skipped: tuple[str, ...] = ()  # one error line per sample that was left out
    is_filler: bool = False  # computed only to give every rank the same number of forward passes; does not count

    @property
    def pair(self) -> tuple[Any, Any]:
        """Inputs and targets.

        Raises:
            TypeError: `data` is not a pair.
        """
        if not isinstance(self.data, list | tuple) or len(self.data) != 2:
            raise TypeError(
                f"a collated microbatch is a {type(self.data).__name__}; it must be a pair (inputs, targets): "
                "return pairs from the dataset, or pass a collate function that returns a pair to the loader"
            )
        return self.data[0], self.data[1]


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, between the cursors `begin` and `end`.

    Attributes:
        indices: dataset indices of the samples of all ranks, in order.
        microbatches: number of microbatches in the batch; a last batch with fewer samples can have fewer.
        local_microbatches: non-empty microbatches of this rank, ascending.
        fillers: fillers that this rank computes afterwards, for strategies that communicate in every forward.
    """

    begin: Cursor
    end: Cursor
    indices: Indices
    microbatches: int
    local_microbatches: tuple[Microbatch, ...]
    fillers: tuple[Microbatch, ...] = ()

    @property
    def size(self) -> int:
        """Number of samples over all ranks."""
        return len(self.indices)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Slice `[start, stop)` of `indices` for each microbatch."""
        return microbatch_bounds(self.size, self.microbatches)

    @property
    def filled(self) -> int:
        """Number of microbatches that have samples."""
        return min(self.microbatches, self.size)

    def samples_of(self, microbatch: int) -> list[int]:
        """Return the dataset indices of the samples in a microbatch."""
        start, stop = self.bounds[microbatch]
        return [int(index) for index in self.indices[start:stop]]


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `function` to every tensor in nested lists, tuples and mappings; other values stay unchanged."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, function) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(value)


def has_rows(data: Any, size: int) -> bool:
    """Return whether every value in nested data is a tensor with rows for `size` samples, one or more per sample."""
    if isinstance(data, torch.Tensor):
        return data.dim() > 0 and data.shape[0] > 0 and data.shape[0] % size == 0
    if isinstance(data, Mapping | list | tuple):
        return all(has_rows(value, size) for value in (data.values() if isinstance(data, Mapping) else data))
    return False


def rows(data: Any, size: int, start: int, stop: int) -> Any:
    """Return the rows of the samples `[start, stop)` of `size` samples."""
    return map_tensors(data, lambda tensor: tensor[start * len(tensor) // size : stop * len(tensor) // size])


def channels_last(data: Any) -> Any:
    """Return `data` with batches of images in the memory format channels-last."""
    return map_tensors(data, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)


def move(data: Any, device: torch.device) -> Any:
    """Return `data` with every tensor on `device`."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def move_next_to(data: Any, other: Any) -> Any:
    """Return `data` on the device of the first tensor in `other`; with a device map, they can differ."""
    device = _first_device(other)
    return data if device is None or _first_device(data) in (None, device) else move(data, device)


def prefetch_to_device(microbatches: Iterator[Microbatch], device: torch.device) -> Iterator[Microbatch]:
    """Yield microbatches on `device`; on a GPU, copy the next one on a separate stream during computation."""
    if device.type != "cuda":
        yield from microbatches
        return
    stream = torch.cuda.Stream(device)
    ahead: Microbatch | None = None
    for microbatch in microbatches:
        with torch.cuda.stream(stream):
            copied = move(microbatch, device)
        if ahead is not None:
            yield ahead
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in tensors_of(copied):  # the allocator must not reuse memory that the current stream still reads
            tensor.record_stream(current)
        ahead = copied
    if ahead is not None:
        yield ahead


def _first_device(data: Any) -> torch.device | None:
    return next((tensor.device for tensor in tensors_of(data)), None)
