"""What every rank of a trial does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from samestep.config import RunOptions
from samestep.engine.norm import norm_layers
from samestep.engine.step import Engine
from samestep.errors import InputError
from samestep.recipes.build import Built, build, world_of
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World
from samestep.tools.bench.contenders import Contender
from samestep.tools.timed import Timed
from samestep.tools.turn import time_steps

_WARMUP = 3  # steps in which memory is taken and kernels are chosen


@dataclass(frozen=True)
class Reached:
    """Where training leads.

    Attributes:
        evaluation: the loss and the recipe's metrics.
        device: what ranks compute on, `cpu` or `cuda`.
        held: bytes of parameters, gradients, buffers and optimizer state, of the rank that holds most.
        peak: bytes that torch had taken of a GPU at once, of the rank that took most; None on a CPU.
        steps_in_epoch: how many there are.
    """

    evaluation: dict[str, float]
    device: str
    held: int
    peak: int | None
    steps_in_epoch: int


def reach(contender: Contender, epochs: int, options: RunOptions) -> Reached | None:
    """Train for some epochs, or for a step if that is none, and evaluate; nothing if somebody asked to end.

    Raises:
        InputError: the recipe cannot be run so.
    """
    with world_of(contender.recipe, options) as world:
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        built = _built(contender, options, world)
        steps = epochs * len(built.train) or 1
        if any(built.engine.step(batch).stop for batch in islice(built.train.endless(), steps)):
            return None
        held, peak = _held(built.engine), _peak(world)
        values = built.engine.evaluate(built.evaluation, list(built.metrics)) if epochs else {}
        most = [max(column) for column in zip(*all_gather([held, peak], world), strict=True)]
        is_gpu = world.device.type == "cuda"
        return Reached(values, world.device.type, most[0], most[1] if is_gpu else None, len(built.train))


def time_all(contenders: Sequence[Contender], steps: int, options: RunOptions) -> list[Timed | None]:
    """Some steps of each contender for as many ranks, one after the other; nothing if somebody asked to end."""
    return [_timed(contender, steps, options) for contender in contenders]


def _timed(contender: Contender, steps: int, options: RunOptions) -> Timed | None:
    with world_of(contender.recipe, options) as world:
        built = _built(contender, options, world)
        turn = time_steps(built.engine, built.train.endless(), warmup=_WARMUP, steps=steps)
        return turn.timed if turn is not None else None


def _built(contender: Contender, options: RunOptions, world: World) -> Built:
    built = build(contender.recipe, options, world)
    if contender.recipe.step.batch_norm == "sync" and not norm_layers(built.engine.model):
        raise InputError("the model has no batch norm", rule="sync BN is of batch norm", do="leave it out")
    return built


def _held(engine: Engine) -> int:
    held = list(engine.pieces.held.values())
    state = [value for values in engine.optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    everything = [*held, *gradients, *engine.model.buffers(), *state]
    return sum(tensor.numel() * tensor.element_size() for tensor in everything if not tensor.is_meta)


def _peak(world: World) -> int:
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
