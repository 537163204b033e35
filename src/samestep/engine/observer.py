"""What looks at engines from outside while they work, and may hold things still for an experiment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from samestep.config import StepRules
from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.loss import Loss

if TYPE_CHECKING:
    from samestep.engine.step import Engine, StepResult


class Observer:
    """Hears what engines of this process do, in the order of the methods; does nothing of its own."""

    def prepare(self, model: torch.nn.Module, rules: StepRules) -> StepRules:
        """An engine is about to take `model`, which may be changed in place; the rules it shall follow."""
        return rules

    def made(self, engine: Engine) -> None:
        """An engine is ready."""

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        """A step begins; nothing has changed yet."""

    def begin_shard(self, part: Shard) -> None:
        """A shard is next: its random state is set, then its training forward runs."""

    def end_shard(self, part: Shard, outputs: Any, loss: Loss) -> None:
        """A shard's training forward and its loss are done."""

    def end_gradients(self, engine: Engine) -> None:
        """Each `.grad` is that of the mean loss of the global batch, not yet clipped."""

    def end_step(self, engine: Engine, result: StepResult) -> None:
        """A step is done."""

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        """An evaluation is done."""


_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Have every engine that this process makes from now on tell `observer`."""
    _observers.append(observer)


def observers() -> tuple[Observer, ...]:
    """Those who look at the engine that is being made."""
    return tuple(_observers)
