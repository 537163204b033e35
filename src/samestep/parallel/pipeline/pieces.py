"""What a rank holds of a model whose layers are on different ranks: the parameters of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.parallel.pieces import Pieces
from samestep.parallel.pipeline.line import Line
from samestep.runtime.gather import all_gather


class StagePieces(Pieces):
    """Parameters by stage. Those of other ranks' stages are there by name, on torch's device without values.

    Attributes:
        line: the stages.
        names: the trained parameters of this rank's stages.
        shared: names of trained parameters that several ranks have (tied weights), by these ranks.
    """

    def __init__(self, model: nn.Module, line: Line) -> None:
        super().__init__(model, line.world.device)
        self.line, self._line = line, line.world
        size = self._line.size
        self._homes = {name: tuple(sorted({s % size for s in used})) for name, used in line.cut.homes.items()}
        trained = list(self.names.values())
        self._leave_own(model)
        self.names = {self._held[name]: name for name in trained if self._is_here(name)}
        self.own_names = {self._own[name]: name for name in trained if self._is_here(name)}
        self.is_divided = True
        self.shared: dict[tuple[int, ...], list[str]] = {}
        for name in trained:
            if len(self._homes[name]) > 1:
                self.shared.setdefault(self._homes[name], []).append(name)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: held for name, held in self.held.items() if held.requires_grad}

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        home, device = self._homes[name][0], self._line.device
        if self._line.rank == home:
            found = super().whole(name, part.detach()).clone().contiguous()
        else:
            division = self._divisions.get(name)
            is_part = division is not None and part.dim() == len(division.shape)
            found = torch.empty(division.shape if division and is_part else part.shape, dtype=part.dtype, device=device)
        if found.numel():
            raw = found.flatten().view(torch.uint8)  # the backend does not know every type
            group = self._line.group
            self._line.guarded(partial(dist.broadcast, raw, group=group, group_src=home), "a broadcast")
        return found

    def everywhere(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        mine = {
            name: {slot: _said(value) for slot, value in slots.items()}
            for name, slots in values.items()
            if self._line.rank == self._homes[name][0]
        }
        said: dict[str, Any] = {}
        for each in all_gather(mine, self._line):
            said |= each
        return {name: self._filled(values.get(name), said[name]) for name in self.held if name in said}

    def total_norm(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._line.device)
        for groups, names in self._by_groups().items():
            here = torch.zeros_like(total)
            for name in names:
                gradient = self._held[name].grad
                if gradient is not None and self._homes[name][0] == self._line.rank:
                    here += gradient.double().square().sum()
            for group in groups:
                dist.all_reduce(here, group=group)
            total += here
        self._line.all_reduce(total)
        return total.sqrt()

    def _is_here(self, name: str) -> bool:
        return self._line.rank in self._homes[name]

    def _leave_own(self, model: nn.Module) -> None:
        """Let go of the parameters of other ranks' stages; buffers stay, those of all stages."""
        empty = {}
        for name, own in list(self._own.items()):
            if not self._is_here(name):
                held = self._held[name]
                self._own[name] = empty[own] = _without_values(own.shape, own)
                self._held[name] = empty[own] if held is own else _without_values(held.shape, own)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter in empty:
                    module._parameters[name] = empty[parameter]

    def _filled(self, mine: Mapping[str, Any] | None, said: Mapping[str, Any]) -> dict[str, Any]:
        return {slot: _stand_in(value) if mine is None else mine[slot] for slot, value in said.items()}


def _without_values(shape: torch.Size, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), like.requires_grad)


def _said(value: Any) -> Any:
    """What JSON can say of a piece of an optimizer's state: a number as it is, a tensor by type and shape."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return value


def _stand_in(said: Any) -> Any:
    if isinstance(said, dict):
        return torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]), device="meta")
    return said
