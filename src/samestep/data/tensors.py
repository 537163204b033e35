"""Tensors in lists, tuples and mappings, as datasets give them and models return them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`data` with `function` of every tensor in the place of it; other things stay what they are."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return {key: map_tensors(value, function) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def first_device(data: Any) -> torch.device | None:
    """Where the first tensor of `data` is, if there is one."""
    if isinstance(data, torch.Tensor):
        return data.device
    inner = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return next((device for value in inner if (device := first_device(value)) is not None), None)
