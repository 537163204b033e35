"""Comparison of results of a whole and a divided call: tensors, numbers taken out of tensors, attributes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import nn

_UNCOMPARED = frozenset(name for name in nn.Module().__dict__ if name not in ("_buffers", "training"))


def largest(tensors: Iterable[torch.Tensor | None]) -> float:
    """Return the largest absolute finite value of all tensors, 0 without one."""
    values = [0.0]
    for tensor in tensors:
        if tensor is not None and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            magnitude = _dense(tensor).abs()
            values.append(float(torch.where(magnitude.isfinite(), magnitude, 0).max()))
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
    if whole.is_complex():
        whole = torch.view_as_real(whole.resolve_conj())
        divided = torch.view_as_real(divided.resolve_conj())
    if not whole.is_floating_point():
        return torch.equal(whole, divided)
    difference = (whole - divided).abs()
    if not difference.numel() or float(difference.max()) <= tolerance:  # not so if it is NaN
        return True
    finite = whole.isfinite()
    if not torch.equal(finite, divided.isfinite()):
        return False
    if not torch.equal(whole[~finite].nan_to_num(0.0), divided[~finite].nan_to_num(0.0)):
        return False
    difference = difference[finite]
    return not difference.numel() or float(difference.max()) <= tolerance


def same_value(whole: Any, divided: Any, tolerance: float) -> bool:  # noqa: PLR0911
    """Whether two numbers, tensors, arrays or containers are equal; the tolerance is relative to the largest value."""
    if whole is divided:
        return True
    if isinstance(whole, weakref.ref) and isinstance(divided, weakref.ref):
        return same_value(whole(), divided(), tolerance)
    if type(whole) is not type(divided):
        return False
    if isinstance(whole, torch.Tensor):
        return close(whole, divided, tolerance * largest([whole]))
    if isinstance(whole, numpy.ndarray):
        return whole.dtype != object and same_value(torch.tensor(whole), torch.tensor(divided), tolerance)
    if isinstance(whole, float | complex):
        one, other = torch.tensor([whole, divided], dtype=torch.complex128)
        return close(one, other, tolerance * abs(whole))
    if isinstance(whole, dict):
        return whole.keys() == divided.keys() and all(
            same_value(value, divided[key], tolerance) for key, value in whole.items()
        )
    if isinstance(whole, list | tuple | deque):
        return len(whole) == len(divided) and all(
            same_value(one, other, tolerance) for one, other in zip(whole, divided, strict=True)
        )
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
