"""Rank function of `step_time.py`: build the contenders, check that they agree, and measure them in turns."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from step_contenders import Contender, Feed, Setting, build_contender

import samestep

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4


class Turn(NamedTuple):
    """Seconds a step in one turn: of the clock, and of this rank's processor time (all its threads)."""

    wall: float
    cpu: float


Round = dict[str, Turn]


@dataclass(frozen=True)
class Plan:
    """One measurement.

    Attributes:
        names: the contenders, see `step_contenders.py`.
        rounds: how often each contender has a turn, for each feed.
        block: steps a turn.
        warmup: steps of each contender before that, for each feed.
    """

    names: tuple[str, ...]
    setting: Setting
    feeds: tuple[Feed, ...]
    rounds: int
    block: int
    warmup: int


def measure(plan: Plan) -> dict[Feed, list[Round]]:
    """Return the turns of every contender in every round; a function for `samestep.launch`."""
    _be_quiet()
    with samestep.start(device="cpu", reduction="fast") as world:
        contenders = [build_contender(name, plan.setting, world) for name in plan.names]
        require_agreement(contenders, world)
        found: dict[Feed, list[Round]] = {}
        for feed in plan.feeds:
            for contender in contenders:
                take_turn(contender, feed, plan.warmup, world)
            found[feed] = [
                {contender.name: take_turn(contender, feed, plan.block, world) for contender in order}
                for order in _orders(contenders, plan.rounds)
            ]
        return found


def take_turn(contender: Contender, feed: Feed, steps: int, world: samestep.World) -> Turn:
    """Some steps, timed from the moment when all ranks are ready to the one when all are done."""
    torch.use_deterministic_algorithms(contender.deterministic)
    world.barrier()
    began = Turn(time.perf_counter(), time.process_time())
    contender.take_steps(feed, steps)
    world.barrier()
    return Turn((time.perf_counter() - began.wall) / steps, (time.process_time() - began.cpu) / steps)


def require_agreement(contenders: Sequence[Contender], world: samestep.World) -> None:
    """One step of each from the same weights and batch; those with one microbatch a rank must have computed the same.

    Raises:
        AssertionError: a first loss, or the weights after the step, differ from those of the first such contender.
    """
    assert torch.get_num_threads() == 1, "a contender changed the number of threads"
    compared: list[tuple[Contender, float, torch.Tensor]] = []
    for contender in contenders:
        torch.use_deterministic_algorithms(contender.deterministic)
        loss = _mean_over_ranks(contender.step(next(contender.feeds["ready"])), world)
        if contender.microbatches == 1:
            weights = torch.cat([parameter.detach().reshape(-1) for parameter in contender.model.parameters()])
            compared.append((contender, loss, weights))
    _, expected, reference = compared[0]
    for contender, loss, weights in compared:
        assert abs(loss - expected) <= LOSS_TOLERANCE * abs(expected), f"{contender.name}: {loss}, not {expected}"
        distance = float((weights - reference).norm() / reference.norm())
        assert distance <= WEIGHT_TOLERANCE, f"{contender.name}: weights differ by {distance} after one step"


def _mean_over_ranks(loss: torch.Tensor | float, world: samestep.World) -> float:
    total = torch.as_tensor(loss, dtype=torch.float64).reshape(1).clone()
    world.all_reduce(total)
    return float(total) / world.size


def _orders(contenders: Sequence[Contender], rounds: int) -> Iterator[list[Contender]]:
    """Everyone once a round, beginning one further on each time, and backwards every other time."""
    for number in range(rounds):
        shift = number // 2 % len(contenders)
        order = [*contenders[shift:], *contenders[:shift]]
        yield order if number % 2 == 0 else order[::-1]


def _be_quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
