"""Tensors as short names of their bits, and the distance between two of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def digest(tensor: torch.Tensor) -> str:
    """A hash of type, shape and every bit of a tensor; where ranks divide it, all of them call this."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    # A flat copy in the order of the elements, whatever the strides; types like bfloat16 have no NumPy counterpart.
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    found = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    found.update(raw.numpy().data)
    return found.hexdigest()


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What lists, tuples and mappings hold, with where it stands: `1.mask`."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from leaves(value, f"{path}.{number}" if path else str(number))
    else:
        yield path, data


def digest_any(data: Any) -> str:
    """A hash of tensors in lists, tuples and mappings; other things by how they are written."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in leaves(data):
        found.update(path.encode())
        found.update(digest(leaf).encode() if isinstance(leaf, torch.Tensor) else repr(leaf).encode())
    return found.hexdigest()


def digest_rows(data: Any, rows: int) -> list[str]:
    """One hash a sample, of the first tensor in `data` that has one row a sample; empty if none has."""
    for _, leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows:
            return [digest(row) for row in leaf]
    return []


def distance(value: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference of two elements, relative to the largest element of `reference`; infinite if not alike.

    Relative to the tensor and not to the element: what cancels to almost nothing has no accuracy of its own.

    Args:
        least: what it is relative to at least.
    """
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return float("inf")
    if not value.numel():
        return 0.0
    exact, other = reference.detach().cpu().double(), value.detach().cpu().double()
    if bool((torch.isfinite(exact) != torch.isfinite(other)).any()):
        return float("inf")
    scale = max(least, largest_element(reference))
    largest = float((other - exact).nan_to_num(posinf=0.0).abs().max())
    if largest == 0.0:
        return 0.0
    return largest / scale if scale else float("inf")


def largest_element(tensor: torch.Tensor) -> float:
    """The largest finite element, its sign aside; 0 if there is none."""
    return float(tensor.detach().cpu().double().abs().nan_to_num(posinf=0.0).max()) if tensor.numel() else 0.0
