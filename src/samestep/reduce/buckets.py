"""Buckets: gradients of several parameters in one flat tensor, which is summed over ranks in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BUCKET_BYTES = (
    8 * 2**20
)  # of gradients in one message; the sum of one overlaps with the computation of the next
_FIRST_BUCKET_BYTES = 2**20  # the first message starts early
_ALIGNMENT_BYTES = 128  # of each gradient: fused optimizers and NCCL read aligned memory faster


class Bucket:
    """Layout of the gradients of some parameters in a flat tensor, and one flag for each that has a gradient.

    Each gradient has the strides of its parameter if these are dense, so that it becomes `.grad`
    without a copy.

    Args:
        parameters: parameters of one dtype on one device.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        first = parameters[0]
        self.dtype = first.dtype
        self.device = first.device
        alignment = _ALIGNMENT_BYTES // first.element_size()
        self._layout: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        offset = 0
        for parameter in parameters:
            self._layout.append((offset, parameter.shape, _dense_strides(parameter)))
            offset += -(-parameter.numel() // alignment) * alignment
        self._flags = offset
        # Complete too: slices of the whole tensor begin and end at aligned memory.
        self._elements = offset + -(-len(parameters) // alignment) * alignment

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return a new flat tensor with the gradients; an absent one is zero, and so is its flag."""
        flat = torch.empty(self._elements, dtype=self.dtype, device=self.device)
        targets = []
        sources = []
        absent = []
        for index, (view, gradient) in enumerate(zip(self.views(flat), gradients, strict=True)):
            if gradient is None:
                view.zero_()
                absent.append(index)
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        flags = flat[self._flags :]
        flags.fill_(1)
        for index in absent:
            flags[index] = 0
        return flat

    def add(self, flat: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those in `flat`, which `fill` returned."""
        targets = []
        sources = []
        for view, gradient in zip(self.views(flat), gradients, strict=True):
            if gradient is not None:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_add_(targets, sources)
        present = [float(gradient is not None) for gradient in gradients]
        flat[self._flags : self._flags + len(present)].add_(
            torch.tensor(present, dtype=self.dtype, device=self.device)
        )

    def remove(self, flat: torch.Tensor, index: int) -> None:
        """Make the gradient of a parameter absent."""
        self.views(flat)[index].zero_()
        flat[self._flags + index] = 0

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients in `flat`, which share its memory."""
        start = flat.storage_offset()
        return [
            flat.as_strided(shape, strides, start + offset)
            for offset, shape, strides in self._layout
        ]

    def gradients(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the gradients in a summed tensor; None if no rank has one."""
        views: list[torch.Tensor | None] = list(self.views(flat))
        # Reading flags of a GPU would wait for it; ranks with the same operations have the same
        # flags.
        if self.device.type == "cpu":
            flags = flat[self._flags : self._flags + len(views)].tolist()
            if not all(flags):
                return [view if flag else None for view, flag in zip(views, flags, strict=True)]
        return views


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter if its elements fill its memory, otherwise those of a contiguous tensor."""
    # In the order of their strides, dimensions of a dense tensor are products of those before them.
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()


def plan_buckets(
    parameters: Sequence[torch.Tensor], first_bytes: int = _FIRST_BUCKET_BYTES
) -> list[list[int]]:
    """Divide parameters into buckets of about `BUCKET_BYTES`, in the order in which gradients become ready.

    The backward computes gradients of the last layers first. Parameters of a bucket have one dtype
    and device.

    Returns:
        Indices of the parameters of each bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        members, size = open_buckets.get(key, ([], 0))
        if not members:
            buckets.append(members)
        members.append(index)
        size += parameter.numel() * parameter.element_size()
        limit = first_bytes if members is buckets[0] else BUCKET_BYTES
        if size >= limit:
            open_buckets.pop(key, None)
        else:
            open_buckets[key] = (members, size)
    return buckets
