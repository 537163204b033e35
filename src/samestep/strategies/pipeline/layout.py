"""Memory layout of tensors that pass from stage to stage.

Kernels round differently for another order of dimensions in memory, and matrix products for another alignment. Messages
are contiguous, so the receiver restores the layout that a tensor has in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

Layout = tuple[tuple[int, ...], int]  # strides, and elements after an aligned address

_ALIGNMENT = 64  # bytes; of new memory


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor."""
    return tuple(tensor.stride()), tensor.data_ptr() % _ALIGNMENT // tensor.element_size()


def contiguous_layout(shape: torch.Size) -> Layout:
    """Return the layout of a new contiguous tensor."""
    sizes = [max(1, size) for size in reversed(shape[1:])]
    return tuple(reversed([*accumulate(sizes, int.__mul__, initial=1)][: len(shape)])), 0


def with_layout(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return a copy of `tensor` with a layout; contiguous for None."""
    if layout is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    strides, offset = layout
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    memory = torch.empty(offset + max(0, last) + 1, dtype=tensor.dtype, device=tensor.device).untyped_storage()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    # Elements of a dimension with stride 0 share memory: one of them is written.
    distinct = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, strides, strict=True)]
    copy.set_(memory, offset, distinct, strides)
    copy.copy_(tensor[tuple(slice(size) for size in distinct)])
    return copy.set_(memory, offset, tensor.shape, strides)


class ReceivedTensor(torch.autograd.Function):
    """Copy of a received tensor, which the stage may change in place; its gradient is contiguous for the backend."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, layout: Layout | None, observe: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Return a copy with a layout; `observe` receives the gradient, in the layout that it has in one process."""
        ctx.observe = observe
        return with_layout(tensor, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.observe(gradients[0])
        return gradients[0].contiguous(), None, None


class SentTensor(torch.autograd.Function):
    """Contiguous copy of a tensor for a message, whose gradient gets the layout that it has in one process."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        ctx.layout = layout
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0] if ctx.layout is None else with_layout(gradients[0], ctx.layout)
        return gradient, None
