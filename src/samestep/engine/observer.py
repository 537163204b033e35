"""What looks at engines from outside while they work, and may hold things still for an experiment."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from samestep.config import StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.loss import Loss, LossFunction
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.result import StepResult
from samestep.parallel.pieces import Pieces
from samestep.runtime.world import World


class Observed(Protocol):
    """An engine as its observers see it; the attributes are those of `Engine`."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction | MultiLoss
    world: World
    rules: StepRules
    pieces: Pieces
    steps: int

    @property
    def strategy(self) -> str: ...


class Observer:
    """Hears what engines of this process do, in the order of the methods; does nothing of its own."""

    def prepare(self, model: torch.nn.Module, rules: StepRules) -> StepRules:
        """An engine is about to take `model`, which may be changed in place; the rules it shall follow."""
        return rules

    def made(self, engine: Observed) -> None:
        """An engine is ready."""

    def begin_step(self, engine: Observed, batch: GlobalBatch) -> None:
        """A step begins; nothing has changed yet."""

    def begin_shard(self, part: Shard) -> None:
        """A shard is next: its random state is set, then its training forward runs."""

    def end_shard(self, part: Shard, outputs: Any, loss: Loss) -> None:
        """A shard's training forward and its loss are done."""

    def end_gradients(self, engine: Observed) -> None:
        """Each `.grad` is that of the mean loss of the global batch, not yet clipped."""

    def end_step(self, engine: Observed, result: StepResult) -> None:
        """A step is done."""

    def end_evaluation(self, engine: Observed, values: dict[str, float]) -> None:
        """An evaluation is done."""


_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Have every engine that this process makes from now on tell `observer`."""
    _observers.append(observer)


def observers() -> tuple[Observer, ...]:
    """Those who look at the engine that is being made."""
    return tuple(_observers)
