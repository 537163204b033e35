"""Nested data of batches, and transfer of their tensors to devices."""

from __future__ import annotations

import hashlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch

from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import is_accelerator


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
        return with_items(
            data, {key: map_nested(value, function, is_leaf) for key, value in data.items()}
        )
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
    total = hashlib.blake2b(digest_size=4)
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = (
                device_reads.copy(value.detach()).contiguous().reshape(-1).view(torch.uint8).numpy()
            )
        if isinstance(value, Mapping | list | tuple):
            stack += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, int | float):
            total.update(repr(value).encode())
        elif hasattr(value, "tobytes"):  # arrays of NumPy, images of PIL
            total.update(value.tobytes())
    return total.hexdigest()


def channels_last(data: Any) -> Any:
    """Return `data` with batches of images in the memory format channels-last."""
    return map_tensors(
        data, lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
    )


def move(data: Any, device: torch.device) -> Any:
    """Return `data` with every tensor on `device`, and every other object that has a method `to`, such as a graph."""
    return map_nested(data, lambda value: _to(value, device), _has_method_to)


def _has_method_to(value: Any) -> bool:
    # Batches of tokenizers are copied as other mappings.
    return hasattr(type(value), "to") and not isinstance(value, dict | UserDict)


def _to(value: Any, device: torch.device) -> Any:
    try:
        # The host would read a copy from an accelerator before its end.
        return value.to(device, non_blocking=is_accelerator(device))
    except TypeError:  # a method without the option
        return value.to(device)
