"""What one stage hands on to the next: its shapes, found by letting one micro-batch through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import InputError
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """What is known of a tensor before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor of this kind, with any values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


def measured(forward: Callable[[int, Tensors], Tensors], stages: int, world: World) -> list[tuple[Kind, ...]]:
    """What arrives at each stage, on every rank of the pipeline; all of them call it.

    Args:
        forward: what a stage of this rank hands on, from the stage and what arrives at it.
        world: the ranks of the pipeline.
    """
    arriving: Tensors = ()
    kinds: list[tuple[Kind, ...]] = [()]
    for stage in range(stages - 1):
        home = stage % world.size
        leaving = forward(stage, arriving) if home == world.rank else ()
        said = all_gather([_said(tensor) for tensor in leaving], world)[home]
        kinds.append(tuple(Kind(tuple(shape), getattr(torch, name), grad) for shape, name, grad in said))
        arriving = _handed_on(kinds[-1], leaving, home, world)
    return kinds


def sent(value: Any, stage: int, *, wants_gradient: bool = False) -> torch.Tensor:
    """A value that a stage hands on, as the backend and the schedule can take it.

    Args:
        wants_gradient: the next stage shall send one, whether or not this one has a use for it.

    Raises:
        InputError: it is no tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"a {type(value).__name__} goes from stage {stage + 1} of the pipeline to the next",
            rule="what stages hand on are tensors",
            do="let strategy.stages begin elsewhere, or keep what is made of shapes inside of a module",
        )
    # Some schedules detach it in place, which cannot be done to a view.
    ready = value.clone(memory_format=torch.contiguous_format) if _is_odd(value) else value
    return ready.requires_grad_() if wants_gradient and ready.is_floating_point() else ready


class Arrived(torch.autograd.Function):
    """What a stage got, as a tensor that it may change; and its gradient as the backend can send it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor._is_view() or tensor.is_leaf or not tensor.is_contiguous()


def _said(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad]


def _handed_on(kinds: tuple[Kind, ...], leaving: Tensors, home: int, world: World) -> Tensors:
    made = []
    for number, kind in enumerate(kinds):
        tensor = leaving[number].detach().clone() if home == world.rank else kind.empty(world.device).detach()
        if tensor.numel():
            raw = tensor.flatten().view(torch.uint8)  # the backend does not know every type
            world.guarded(partial(dist.broadcast, raw, group=world.group, group_src=home), "a broadcast")
        made.append(tensor.requires_grad_(kind.requires_grad))
    return tuple(made)
