"""Buffers that a training forward changes: batch norm's running statistics and their like.

Each shard starts from the buffers that the step began with, and the step ends with the mean over shards of what
they became, in canonical order. For batch norm that is what as many GPUs as there are shards would compute without
SyncBN, on any number of processes.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase


class ShardedBuffers:
    """The buffers of a model that steps average.

    These are the persistent ones of floating type, and counters (integers of one element, whose mean over shards
    that agree is exact). Masks and tables are left alone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        found = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and _is_averaged(buffer)
        ]
        self._names = [full for full, _, _ in found]
        self._places = [(module, name) for _, module, name in found]
        self._start: list[torch.Tensor] = []
        self.length = sum(buffer.numel() for buffer in self._current())

    @property
    def names(self) -> list[str]:
        """The model's names for these buffers."""
        return self._names

    def begin(self) -> None:
        """Remember the buffers that the step begins with."""
        self._start = [buffer.clone() for buffer in self._current()]

    def restore(self) -> None:
        """Set the buffers to what they were when the step began."""
        current = self._current()
        if current:
            torch._foreach_copy_(current, self._start)

    def read(self) -> torch.Tensor:
        """All buffers as one float64 vector of `length`."""
        if not self._places:
            return torch.empty(0, dtype=torch.float64)
        current = self._current()
        return torch.cat([buffer.detach().reshape(-1).double().to(current[0].device) for buffer in current])

    def write(self, vector: torch.Tensor) -> None:
        """Set the buffers from such a vector."""
        current = self._current()
        if current:
            values = vector.split([buffer.numel() for buffer in current])
            torch._foreach_copy_(
                current, [value.view_as(buffer) for value, buffer in zip(values, current, strict=True)]
            )

    def _current(self) -> list[torch.Tensor]:
        # Asked for by name each time: a module may put a new tensor in the place of a buffer.
        return [getattr(module, name) for module, name in self._places]


Modes = list[tuple[torch.nn.Module, bool]]


def training_modes(model: torch.nn.Module) -> Modes:
    """Each module with whether it trains: all do except norm layers all of whose parameters are frozen.

    Those belong to a pretrained part that must not move, and their running statistics are part of it.
    """
    return [(module, not _is_frozen_norm(module)) for module in model.modules()]


def set_modes(modes: Modes) -> None:
    """Set every module to its mode; a look at each is all it takes where nothing changed."""
    for module, trains in modes:  # parents first: setting one sets all below it
        if module.training is not trains:
            module.train(trains)


def _is_frozen_norm(module: torch.nn.Module) -> bool:
    parameters = list(module.parameters())
    frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
    return frozen and isinstance(module, _NormBase)


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or (
        buffer.numel() == 1 and not buffer.is_complex() and buffer.dtype != torch.bool
    )
