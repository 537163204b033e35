"""Norms and sums of the first values of tensors, read with one transfer for several tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_VALUES = 1024  # of a tensor

Summaries = dict[str, list[float] | None]


def first_values(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return copies of the first values of tensors in float64, and None for tensors that cannot be compared."""
    return {name: _first_values(tensor) for name, tensor in tensors.items()}


def summaries(*parts: Mapping[str, torch.Tensor | None]) -> list[Summaries]:
    """Return norm and sum of each result of `first_values`."""
    values = [value for part in parts for value in part.values() if value is not None]
    if not values:
        return [dict.fromkeys(part) for part in parts]
    first = values[0]
    flat = torch.cat([value.to(first.device) for value in values]).cpu().numpy()
    ends = np.cumsum([len(value) for value in values])
    with np.errstate(all="ignore"):
        starts = [0, *ends[:-1]]
        norms, sums = np.sqrt(np.add.reduceat(flat * flat, starts)), np.add.reduceat(flat, starts)
    pairs = iter(zip(norms.tolist(), sums.tolist(), strict=True))
    return [{name: None if value is None else [*next(pairs)] for name, value in part.items()} for part in parts]


def _first_values(tensor: torch.Tensor | None) -> torch.Tensor | None:
    is_plain = tensor is not None and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if tensor is None or not is_plain or tensor.layout != torch.strided or not tensor.is_floating_point():
        return None
    if tensor.numel() == 0:
        return None
    tensor = tensor.detach()
    if tensor.dim() > 1:  # rows first: to flatten a tensor that is not contiguous copies all of it
        tensor = tensor[: 1 + _VALUES * len(tensor) // tensor.numel()]
    return tensor.flatten()[:_VALUES].to(torch.float64, copy=True)
