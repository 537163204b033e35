"""Comparison of results of a whole and a divided call: tensors, numbers taken out of tensors, attributes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from math import isfinite
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

_UNCOMPARED = frozenset(name for name in nn.Module().__dict__ if name not in ("_buffers", "training"))


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest absolute finite value of all tensors, 0 without one."""
    values = [0.0]
    for tensor in tensors:
        if tensor is not None and tensor.numel() and has_fractions(tensor):
            magnitude = _dense(tensor).abs()
            value = float(magnitude.max())
            if not isfinite(value):
                value = float(torch.where(magnitude.isfinite(), magnitude, 0).max())
            values.append(value)
    return max(values)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return tensor
    return tensor.to_dense()


def close(whole: torch.Tensor, divided: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors have the same shape, dtype, and values up to an absolute tolerance.

    NaN is equal to NaN, and an infinity to the same infinity. Integers and booleans are equal exactly.
    """
    if whole.shape != divided.shape or whole.dtype != divided.dtype or whole.layout != divided.layout:
        return False
    whole = _dense(whole)
    divided = _dense(divided)
    if not has_fractions(whole):
        return torch.equal(whole, divided)
    if not whole.numel() or float((whole - divided).abs().max()) <= tolerance:  # not so if it is NaN
        return True
    return torch.allclose(whole, divided, rtol=0.0, atol=tolerance, equal_nan=True)


def has_fractions(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are not integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def same_value(whole: Any, divided: Any, tolerance: float) -> bool:
    """Whether two numbers, tensors, arrays or containers are equal; the tolerance is relative to the largest value."""
    leaves, spec = tree_flatten(whole)
    others, other_spec = tree_flatten(divided)
    return spec == other_spec and all(_same_leaf(*pair, tolerance) for pair in zip(leaves, others, strict=True))


def _same_leaf(whole: Any, divided: Any, tolerance: float) -> bool:
    if whole is divided:
        return True
    if type(whole) is not type(divided):
        return False
    if isinstance(whole, weakref.ref):
        return same_value(whole(), divided(), tolerance)
    if isinstance(whole, float | complex | numpy.ndarray | numpy.generic):
        if isinstance(whole, numpy.ndarray) and whole.dtype == object:
            return False
        whole = torch.tensor(whole)
        divided = torch.tensor(divided)
    if isinstance(whole, torch.Tensor):
        return close(whole, divided, tolerance * largest([whole]))
    return bool(whole == divided)


def written_values(module: nn.Module) -> dict[str, Any]:
    """Return copies of buffers and attributes of a module and its submodules, by name; tensors by reference."""
    values: dict[str, Any] = {}
    for prefix, submodule in module.named_modules():
        for name, value in submodule.__dict__.items():
            if name == "_buffers":
                values.update({f"{prefix}.{key}".lstrip("."): buffer for key, buffer in value.items()})
            elif name not in _UNCOMPARED:
                values[f"{prefix}.{name}".lstrip(".")] = _copied(value)
    return values


def _copied(value: Any) -> Any:
    """Return a copy of nested containers."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_copied(item) for item in value]
    if isinstance(value, set):
        return set(value)
    return value
