"""Buckets of gradients: which parameters one message sums, and their places in its tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of gradients in one message; the sum of one overlaps with the computation of the next.
BUCKET_BYTES = 8 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # the first message starts early
_ALIGNMENT_BYTES = 128  # of each gradient: fused optimizers and NCCL read aligned memory faster


class Bucket:
    """Layout of the gradients of some parameters in a flat tensor, with a flag for each present.

    Each gradient has the strides of its parameter if these are dense, so that it becomes `.grad`
    without a copy.

    Args:
        parameters: parameters of one dtype on one device.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.dtype = first.dtype
        self.device = first.device
        alignment = _ALIGNMENT_BYTES // first.element_size()
        self._layout: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        offset = 0
        for parameter in parameters:
            self._layout.append((offset, parameter.shape, _dense_strides(parameter)))
            offset += -(-parameter.numel() // alignment) * alignment
        self._flags = slice(offset, offset + len(parameters))
        # Complete too: slices of the whole tensor begin and end at aligned memory.
        self._elements = offset + -(-len(parameters) // alignment) * alignment

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return a new flat tensor of gradients; an absent one is zero, and so is its flag."""
        flat = torch.empty(self._elements, dtype=self.dtype, device=self.device)
        # The flags are summed with the gradients, and need no message of their own.
        flat[self._flags.start :].fill_(1)
        targets = []
        sources = []
        for index, (view, gradient) in enumerate(zip(self.views(flat), gradients, strict=True)):
            if gradient is None:
                view.zero_()
                flat[self._flags.start + index] = 0
            else:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    def add(self, flat: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those in `flat`, which `fill` returned."""
        pairs = zip(self.views(flat), gradients, strict=True)
        present = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if present:
            targets, sources = zip(*present, strict=True)
            torch._foreach_add_(targets, sources)
        flags = [float(gradient is not None) for gradient in gradients]
        flat[self._flags].add_(torch.tensor(flags, dtype=self.dtype, device=self.device))

    def remove(self, flat: torch.Tensor, index: int) -> None:
        """Make the gradient of a parameter absent."""
        self.views(flat)[index].zero_()
        flat[self._flags.start + index] = 0

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
        # Reading flags of a GPU would wait for it; ranks with the same operations have the same.
        if self.device.type == "cpu":
            for index, flag in enumerate(flat[self._flags].tolist()):
                if not flag:
                    views[index] = None
        return views


def _dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter that fills its memory, otherwise contiguous ones."""
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
    """Divide parameters into buckets of about `BUCKET_BYTES`, in the order of their gradients.

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
        members, size = open_buckets.pop(key, ([], 0))
        if not members:
            buckets.append(members)
        members.append(index)
        size += parameter.nbytes
        limit = first_bytes if members is buckets[0] else BUCKET_BYTES
        if size < limit:
            open_buckets[key] = (members, size)
    return buckets
