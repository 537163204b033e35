"""Nested data of batches, transfer of their tensors to devices, and types of data sets."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, Protocol

import torch

from samestep.distributed.devices import is_accelerator

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """Map-style data set: a length, and one sample per index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `function` to every tensor in nested lists, tuples and mappings.

    Containers keep their types, and other values stay unchanged.
    """
    return _map_nested(data, function, lambda value: isinstance(value, torch.Tensor))


def _map_nested(data: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    # First: a container can be a leaf, such as a packed sequence.
    if is_leaf(data):
        return function(data)
    if isinstance(data, Mapping):
        named = {key: _map_nested(value, function, is_leaf) for key, value in data.items()}
        return with_values(data, named)
    if isinstance(data, list | tuple):
        return with_values(data, [_map_nested(value, function, is_leaf) for value in data])
    return data


def with_values(container: Any, values: dict[Any, Any] | list[Any]) -> Any:
    """Return a container of the same type with other values.

    Args:
        container: mapping, list or tuple.
        values: values by key for a mapping, which becomes a `dict` if its type has no assignment.
    """
    if isinstance(values, list):
        if hasattr(container, "_fields"):  # a named tuple, which takes values one by one
            return type(container)(*values)
        return type(container)(values)
    if type(container) is dict or not hasattr(container, "__setitem__"):
        return values
    result = copy(container)  # with attributes, such as the encodings of a tokenizer
    for key, value in values.items():
        result[key] = value
    return result


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        yield from tensors_of(list(data.values()))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_of(value)


def channels_last(data: Any) -> Any:
    """Return `data` with batches of images in the memory format channels-last."""

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 4:  # torch has this format for four dimensions alone
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)

    return map_tensors(data, converted)


def move(data: Any, device: torch.device) -> Any:
    """Return `data` with tensors and other objects that have a method `to` on `device`."""

    def is_leaf(value: Any) -> bool:
        # Batches of tokenizers have such a method, which would change the original.
        return hasattr(type(value), "to") and not isinstance(value, dict | UserDict)

    return _map_nested(data, lambda value: _to(value, device), is_leaf)


def _to(value: Any, device: torch.device) -> Any:
    try:
        # The host would read a copy from an accelerator before its end.
        return value.to(device, non_blocking=is_accelerator(device))
    except TypeError:  # a method without the option
        return value.to(device)
