"""What a rank holds of a model whose layers are on different ranks: the parameters of its stages, each whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.parallel.pieces import Pieces
from samestep.parallel.pipeline.cut import Cut
from samestep.parallel.pipeline.line import Line
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World


def leave_own(model: nn.Module, cut: Cut, world: World) -> dict[str, tuple[int, ...]]:
    """Leave of `model` on this rank the parameters of its stages; the others are names and shapes without values.

    Buffers stay: all ranks of a pipeline have those of all stages.

    Args:
        world: the ranks of the pipeline.

    Returns:
        For the name of each parameter, the ranks of the pipeline that have it.
    """
    homes = {name: tuple(sorted({stage % world.size for stage in used})) for name, used in cut.homes.items()}
    empty = {
        parameter: nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if world.rank not in homes[name]
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in empty:
                module._parameters[name] = empty[parameter]
    return homes


class StagePieces(Pieces):
    """Parameters by stage. Those of other ranks' stages are there by name, on torch's device without values.

    Attributes:
        line: the stages.
        names: the trained parameters of this rank's stages.
        shared: names of trained parameters that several ranks have (tied weights), by these ranks.
    """

    def __init__(self, model: nn.Module, homes: Mapping[str, tuple[int, ...]], line: Line) -> None:
        super().__init__(model, line.world.device)
        self._homes, self.line, self._line = homes, line, line.world
        trained = list(self.names.values())
        self.names = {held: name for held, name in self.names.items() if self._line.rank in homes[name]}
        self.own_names = {own: name for own, name in self.own_names.items() if self._line.rank in homes[name]}
        self.is_divided = True
        self.shared: dict[tuple[int, ...], list[str]] = {}
        for name in trained:
            if len(homes[name]) > 1:
                self.shared.setdefault(homes[name], []).append(name)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: held for name, held in self.held.items() if held.requires_grad}

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        home = self._homes[name][0]
        found = part.detach().clone() if self._line.rank == home else torch.empty_like(part, device=self._line.device)
        found = found.contiguous()
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
        squares = torch.zeros((), dtype=torch.float64, device=self._line.device)
        for parameter, name in self.names.items():
            if parameter.grad is not None and self._homes[name][0] == self._line.rank:
                squares += parameter.grad.double().square().sum()
        self._line.all_reduce(squares)
        return squares.sqrt()

    def _filled(self, mine: Mapping[str, Any] | None, said: Mapping[str, Any]) -> dict[str, Any]:
        return {slot: _stand_in(value) if mine is None else mine[slot] for slot, value in said.items()}


def _said(value: Any) -> Any:
    """What JSON can say of a piece of an optimizer's state: a number as it is, a tensor by type and shape."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return value


def _stand_in(said: Any) -> Any:
    if isinstance(said, dict):
        return torch.empty(said["shape"], dtype=getattr(torch, said["dtype"]), device="meta")
    return said
