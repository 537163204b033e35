"""Gradients as one flat tensor, each in the order in which its parameter lies in memory.

That is how DDP's buckets hold them ("gradient layout contract" of torch): a parameter that lies channels last has its
elements in another order there than in its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flattened(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of the shapes of `parameters`, side by side."""
    return torch.cat([_in_memory_order(t, p) for t, p in zip(tensors, parameters, strict=True)])


def taken_apart(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` with the shapes and the layout of `parameters`."""
    values = flat.split([parameter.numel() for parameter in parameters])
    return [
        value.as_strided(p.size(), _strides(p), value.storage_offset())
        for value, p in zip(values, parameters, strict=True)
    ]


def _in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.is_contiguous():
        return tensor.reshape(-1)
    laid_out = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
    return laid_out.as_strided((laid_out.numel(),), (1,), laid_out.storage_offset())


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    # As torch gives them to a copy: the parameter's own, unless it has holes or overlaps.
    return torch.empty_like(parameter, device="meta").stride()
