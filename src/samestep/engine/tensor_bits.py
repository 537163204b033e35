"""Bits of tensors: copies of many at once, comparisons, hashes, and numbers of writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNKNOWN_VERSION = -1  # version of a value that has none
_FACTOR, _HASH_BITS = 6364136223846793005, 52  # float64 holds integers of 53 bits


def copy_tensors(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values` to `to`.

    One call per pair of types: torch raises on empty lists, CUDA copies lists of several types one tensor at a time,
    and torch 2.10 writes all of them as the type of the first (https://github.com/pytorch/pytorch/issues/173383).
    """
    groups: dict[tuple[torch.dtype, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, value in zip(to, values, strict=True):
        targets, sources = groups.setdefault((target.dtype, value.dtype), ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as integers."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTEGERS[real.element_size()])


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous copies of tensors; one kernel per type and device, for any number of tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(position)
    result = list(tensors)
    for positions in groups.values():
        joined = torch.cat([tensors[position].reshape(-1) for position in positions])
        pieces = joined.split_with_sizes([tensors[position].numel() for position in positions])
        for position, piece in zip(positions, pieces, strict=True):
            result[position] = piece.view(tensors[position].shape)
    return result


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors of one type as a float64 vector; complex elements as two."""
    joined = torch.cat(_rows(tensors, tensors[0].device))
    real = torch.view_as_real(joined.resolve_conj()).reshape(-1) if joined.is_complex() else joined
    return real.double()


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor in the result of `flat`."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as a vector of bytes."""
    return bits_of(tensor).reshape(-1).view(torch.uint8)


def hash_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an integer of `_HASH_BITS` bits that depends on all bits of some tensors."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    pieces = [bytes_of(torch.cat(_rows(group, tensors[0].device))) for group in groups.values()]
    data = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    total: torch.Tensor = (data.long() * _weights(len(data), data.device)).sum() & (2**_HASH_BITS - 1)
    return total


def _rows(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors as vectors on a device. Calls without an effect take more time than these conditions."""
    rows = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]
    return [row if row.device == device else row.to(device) for row in rows]


@cache
def _weights(length: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, length + 1, device=device) * _FACTOR) | 1


def version_of(value: Any) -> int:
    """Return the number of writes to a tensor; `UNKNOWN_VERSION` for other values, inference tensors and parameters."""
    # The check of `torch.nn.Parameter` is slow.
    is_counted = type(value) is torch.Tensor or (
        isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    )
    return value._version if is_counted and not value.is_inference() else UNKNOWN_VERSION


def any_differs(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return whether some bits of tensors differ, on their device; some kernels per type, for any number of tensors."""
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for value, other in zip(values, others, strict=True):
        pair = groups.setdefault((value.dtype, value.device), ([], []))
        pair[0].append(value.reshape(-1))
        pair[1].append(other.reshape(-1))
    flags = [(bits_of(torch.cat(one)) != bits_of(torch.cat(other))).any() for one, other in groups.values()]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).any()
