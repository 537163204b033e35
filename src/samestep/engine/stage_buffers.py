"""Buffers that the stages of a pipeline change: each shard begins with those of the step, whenever it comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.engine.buffers import ShardedBuffers


class StageBuffers:
    """Those of the buffers that steps average that belong to this rank's stages.

    Args:
        stages: the stage of each buffer, in the order of `ShardedBuffers`.
        own: the stages of this rank.
    """

    def __init__(self, model: torch.nn.Module, stages: Sequence[int], own: Sequence[int]) -> None:
        self._own = own
        self._device = next((buffer.device for buffer in model.buffers()), None)
        self._places: dict[int, list[tuple[torch.nn.Module, str, slice]]] = {stage: [] for stage in own}
        self.length = 0
        for full, stage in zip(ShardedBuffers(model).names, stages, strict=True):
            path, _, name = full.rpartition(".")
            module = model.get_submodule(path)
            place = slice(self.length, self.length + getattr(module, name).numel())
            self.length = place.stop
            if stage in self._places:
                self._places[stage].append((module, name, place))
        self._start: list[tuple[torch.nn.Module, str, torch.Tensor]] = []

    def begin(self) -> None:
        """Remember the buffers that the step begins with."""
        everywhere = [place for stage in self._own for place in self._places[stage]]
        self._start = [(module, name, getattr(module, name)) for module, name, _ in everywhere]

    def empty(self) -> torch.Tensor:
        """A vector of `length` in which nothing is written yet."""
        return torch.zeros(self.length, dtype=torch.float64, device=self._device)

    def renew(self, stage: int) -> None:
        """Give a stage what the step began with, in new tensors: graphs of other shards may still need the old."""
        start = {(module, name): tensor for module, name, tensor in self._start}
        for module, name, _ in self._places[stage]:
            setattr(module, name, start[module, name].clone())

    def read(self, stage: int, vector: torch.Tensor) -> None:
        """Write what a stage has made of its buffers to their places in a vector of `length`."""
        for module, name, place in self._places[stage]:
            vector[place] = getattr(module, name).detach().reshape(-1)

    def end(self) -> None:
        """Put the tensors back that the step began with, their values too."""
        for module, name, tensor in self._start:
            setattr(module, name, tensor)
        self._start = []
