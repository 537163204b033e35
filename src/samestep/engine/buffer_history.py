"""What steps found in the buffers that they average."""

from __future__ import annotations

import torch

from samestep.engine.buffers import ShardedBuffers

_FACTOR = 6364136223846793005  # odd, so that no power of it takes a difference away


class BufferHistory:
    """A record of the averaged buffers at the beginning of each step, in one word an element.

    A step ends with the mean of what shards made of them, so a buffer that was wrong on one rank is soon the same on
    all: looking at the buffers alone comes too late.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._buffers = model, ShardedBuffers(model)
        self._history: torch.Tensor | None = None

    def add(self) -> None:
        """A step begins: h = h P + bits, modulo 2^64; a difference in one step stays a difference for ever."""
        bits = self._buffers.read().view(torch.int64)
        self._history = bits if self._history is None else self._history * _FACTOR + bits

    def tensors(self) -> dict[str, torch.Tensor]:
        """The record by buffer, once there is one."""
        if self._history is None:
            return {}
        names = self._buffers.names
        parts = self._history.split([self._model.get_buffer(name).numel() for name in names]) if names else ()
        return {f"buffer {name}, as a step found it": part for name, part in zip(names, parts, strict=True)}
