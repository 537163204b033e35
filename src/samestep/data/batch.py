"""Global batches and microbatches, and transfer of their tensors to devices."""

from __future__ import annotations

import hashlib
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from samestep.data.order import Indices
from samestep.distributed.devices import accelerator_module, copy_stream, is_accelerator
from samestep.errors import InputError
from samestep.microbatches import Cursor, microbatch_bounds


class BatchSource(Protocol):
    """Loader of batches, with a position."""

    def end_step(self, batch: GlobalBatch, *, stop: bool) -> None:
        """Move the position to the end of a batch of a completed step; `stop` if the step received a stop request."""


class Microbatch(NamedTuple):
    """One microbatch with its data."""

    number: int  # index among the microbatches of the global batch, from 0
    size: int  # number of usable samples; 0 if none is usable, and `data` then holds a substitute sample
    data: Any  # output of the collate function; the engine expects a pair `(inputs, targets)`
    skipped: tuple[str, ...] = ()  # one error line per sample that was left out
    is_filler: bool = False  # computed only to give every rank the same number of forward passes; does not count
    left_out: tuple[int, ...] = ()  # dataset indices of the samples in `skipped`

    @property
    def pair(self) -> tuple[Any, Any]:
        """Inputs and targets.

        Raises:
            InputError: `data` is not a pair.
        """
        if not isinstance(self.data, list | tuple) or len(self.data) != 2:
            length = f" of {len(self.data)}" if isinstance(self.data, list | tuple) else ""
            raise InputError(
                f"a microbatch is a {type(self.data).__name__}{length}",
                expected="a pair (inputs, targets), if no forward function is given",
                fix="engine.step(batch, forward=lambda model, batch: model(**batch).loss), or pairs from the dataset",
                code="E_BATCH",
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
        dataset: description of the dataset, equal on every rank.
        source: the loader, whose position moves with steps of the batch.
        iteration: number of the iteration over the loader.
    """

    begin: Cursor
    end: Cursor
    indices: Indices
    microbatches: int
    local_microbatches: tuple[Microbatch, ...]
    fillers: tuple[Microbatch, ...] = ()
    dataset: str = ""
    source: BatchSource | None = field(default=None, repr=False)
    iteration: int = field(default=0, repr=False)

    @property
    def identity(self) -> str:
        """Text with position and samples, equal on every rank."""
        begin = self.begin
        digest = hashlib.blake2b(numpy.asarray(self.indices).tobytes(), digest_size=4).hexdigest()
        return (
            f"{self.size} samples in {self.microbatches} microbatches from sample {begin.samples} of epoch "
            f"{begin.epoch}, indices {digest}"
        )

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
    """Apply `function` to every tensor in nested lists, tuples and mappings, which keep their types.

    Other values stay unchanged.
    """
    return map_nested(data, function, lambda value: isinstance(value, torch.Tensor))


def map_nested(data: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Apply `function` to the leaves in nested lists, tuples and mappings, which keep their types."""
    if is_leaf(data):
        return function(data)
    if isinstance(data, Mapping):
        return with_items(data, {key: map_nested(value, function, is_leaf) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_nested(value, function, is_leaf) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_nested(value, function, is_leaf) for value in data)
    return data


def with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other values of its keys; a `dict` if the type has no assignment."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    result = copy(mapping)  # with attributes, such as the encodings of a tokenizer
    for key, value in items.items():
        result[key] = value
    return result


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(value)


def digest_of(data: Any) -> str:
    """Return a hash of the tensors, arrays, images and numbers in nested data, but not of text, such as local paths."""
    total, stack = hashlib.blake2b(digest_size=4), [data]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, Mapping | list | tuple):
            stack += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, int | float):
            total.update(repr(value).encode())
        elif hasattr(value, "tobytes"):  # arrays of NumPy, images of PIL
            total.update(value.tobytes())
    return total.hexdigest()


def channels_last(data: Any) -> Any:
    """Return `data` with batches of images in the memory format channels-last."""
    return map_tensors(data, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)


def move(data: Any, device: torch.device) -> Any:
    """Return `data` with every tensor on `device`, and every other object that has a method `to`, such as a graph."""
    return map_nested(data, lambda value: _to(value, device), _has_method_to)


def _move_tensors(data: Any, device: torch.device) -> Any:
    return map_nested(
        data, lambda value: _to(value, device) if isinstance(value, torch.Tensor) else value, _has_method_to
    )


def _has_method_to(value: Any) -> bool:
    # Batches of tokenizers are copied as other mappings.
    return hasattr(type(value), "to") and not isinstance(value, dict | UserDict)


def _to(value: Any, device: torch.device) -> Any:
    try:
        # The host would read a copy from an accelerator before its end.
        return value.to(device, non_blocking=is_accelerator(device))
    except TypeError:  # a method without the option
        return value.to(device)


def move_next_to(data: Any, other: Any) -> Any:
    """Return `data` on the device of the first tensor in `other`; with a device map, they can differ."""
    device = _first_device(other)
    return data if device is None or _first_device(data) in (None, device) else move(data, device)


def prefetch_to_device(
    microbatches: Iterator[Microbatch], device: torch.device, ahead: int = 1
) -> Iterator[Microbatch]:
    """Yield microbatches on `device`; on a GPU, copy the next `ahead` ones on another stream during computation."""
    if not is_accelerator(device):
        yield from microbatches
        return
    module, stream = accelerator_module(), copy_stream(device)
    copied: deque[tuple[Microbatch, Any]] = deque()
    for microbatch in chain(microbatches, [None] * ahead):
        if microbatch is not None:
            with module.stream(stream):
                copied.append((_move_tensors(microbatch, device), stream.record_event()))
        if copied and (microbatch is None or len(copied) > ahead):
            ready, event = copied.popleft()
            current = module.current_stream(device)
            current.wait_event(event)
            for tensor in tensors_of(ready):  # the allocator must not reuse memory that the current stream still reads
                if is_accelerator(tensor.device):
                    tensor.record_stream(current)
            yield move(ready, device)  # the tensors of other objects cannot be recorded: copy in the current stream


def _first_device(data: Any) -> torch.device | None:
    return next((tensor.device for tensor in tensors_of(data)), None)
