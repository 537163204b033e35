"""Buckets: gradients as one flat tensor, each in the memory order of its parameter.

This is the order of DDP's buckets (torch's "gradient layout contract"): for a channels-last parameter it differs from
the order of the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

_BUCKET_ELEMENTS = 4 * 2**20


def flatten(tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors with the shapes of `parameters` as one flat tensor."""
    return torch.cat([_in_memory_order(t, p) for t, p in zip(tensors, parameters, strict=True)])


def unflatten(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of `flat` with the shapes and strides of `parameters`."""
    values = flat.split([parameter.numel() for parameter in parameters])
    # Strides of a copy: those of the parameter, unless it has holes or overlaps.
    copies = [torch.empty_like(parameter, device="meta") for parameter in parameters]
    return [
        value.as_strided(copy.size(), copy.stride(), value.storage_offset())
        for value, copy in zip(values, copies, strict=True)
    ]


def _in_memory_order(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if parameter.is_contiguous():
        return tensor.reshape(-1)
    copy = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
    return copy.as_strided((copy.numel(),), (1,), copy.storage_offset())


def reduce_gradients(
    parameters: Iterable[torch.nn.Parameter], reduce: Callable[[list[torch.nn.Parameter]], torch.Tensor]
) -> None:
    """Set `.grad` of each parameter, bucket by bucket; `reduce` returns the flat sum of the gradients of a bucket."""
    for bucket in _buckets(parameters):
        for parameter, gradient in zip(bucket, unflatten(reduce(bucket), bucket), strict=True):
            parameter.grad = gradient


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Split parameters, in order, into buckets of one dtype and device, so that no message is as large as the model."""
    bucket: list[torch.nn.Parameter] = []
    for parameter in parameters:
        is_full = sum(p.numel() for p in bucket) + parameter.numel() > _BUCKET_ELEMENTS
        if bucket and (is_full or (parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
