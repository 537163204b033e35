"""Buffers that a training forward changes, such as the running statistics of batch norm.

Each microbatch starts with the buffers at the beginning of the step. The step ends with the mean over microbatches of
the changed buffers, in canonical order. For batch norm this equals the result of one device per microbatch without
SyncBN, on any number of processes.
"""

from __future__ import annotations

import torch


class MicrobatchBuffers:
    """Buffers of a model that a step averages over microbatches.

    These are persistent buffers of floating-point type, and counters: integers of one element, whose mean over equal
    values is exact. Masks and tables are left alone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._locations = {
            f"{path}.{name}" if path else name: (module, name)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and _is_averaged(buffer)
        }
        self.names = list(self._locations)
        self._start: list[torch.Tensor] = []
        self.length = sum(buffer.numel() for buffer in self._current())

    def begin(self) -> None:
        """Copy the buffers at the beginning of a step."""
        self._start = [buffer.clone() for buffer in self._current()]

    def restore(self) -> None:
        """Set the buffers to their values at the beginning of the step."""
        copy_tensors(self._current(), self._start)

    def read(self) -> torch.Tensor:
        """Return all buffers as one float64 vector of `length` elements."""
        current = self._current()
        if not current:
            return torch.empty(0, dtype=torch.float64)
        return torch.cat([buffer.detach().reshape(-1).double().to(current[0].device) for buffer in current])

    def write(self, vector: torch.Tensor) -> None:
        """Set the buffers from a vector as returned by `read`."""
        current = self._current()
        parts = zip(vector.split([buffer.numel() for buffer in current]), current, strict=True)
        copy_tensors(current, [values.view_as(buffer) for values, buffer in parts])

    def _current(self) -> list[torch.Tensor]:
        # Looked up by name each time: a module may replace a buffer by a new tensor.
        return [getattr(module, name) for module, name in self._locations.values()]


def copy_tensors(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy `values` to `to`; torch's function raises on empty lists."""
    if to:
        torch._foreach_copy_(to, values)


def _is_averaged(buffer: torch.Tensor) -> bool:
    is_counter = buffer.numel() == 1 and not buffer.is_complex() and buffer.dtype != torch.bool
    return buffer.is_floating_point() or is_counter
