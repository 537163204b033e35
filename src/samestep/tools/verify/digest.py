"""Digests of tensors and of nested data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from samestep.strategies.tensor_slices import SlicedTensor


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the dtype, the shape and every bit of a tensor; collective for a `DTensor`."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    # A contiguous copy, so that strides do not matter; viewed as bytes, since NumPy has no bfloat16.
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    result = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    result.update(raw.numpy().data)
    return result.hexdigest()


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested lists, tuples and mappings with their paths, such as `1.mask`."""
    if isinstance(data, Mapping | list | tuple):
        for key, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, data


def digest_any(data: Any) -> str:
    """Return a hash of nested data; leaves that are not tensors enter by their `repr`. Collective if divided."""
    result = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves(data):
        result.update(path.encode())
        value = leaf.join() if isinstance(leaf, SlicedTensor) else leaf
        result.update(digest(value).encode() if isinstance(value, torch.Tensor) else repr(value).encode())
    return result.hexdigest()


def digest_rows(data: Any, rows: int) -> list[str]:
    """Return one hash per sample, of the first tensor with one row per sample; empty without such a tensor."""
    for _, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return [digest(row) for row in leaf]
    return []
