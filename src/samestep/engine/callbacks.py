"""Hooks of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, map_tensors, move_next_to
from samestep.distributed.world import World
from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepResult
from samestep.metrics.counts import CountMetric
from samestep.metrics.metrics import FunctionMetric, LossMetric, Metric, TorchMetric, require_outputs

if TYPE_CHECKING:
    from samestep.data.loader import Loader
    from samestep.engine.engine import Engine


class Callback:
    """Read-only hooks, called in the order of the methods; each does nothing by default.

    Attributes:
        repeats_microbatches: the callback compares microbatches with repetitions: a rank computes one after another.
    """

    repeats_microbatches = False

    def loader_created(self, loader: Loader) -> None:
        """Called at the end of the construction of a loader, for the callbacks of `samestep.start`'s world."""

    def engine_created(self, engine: Engine) -> None:
        """Called at the end of the engine's construction."""

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        """Called at the beginning of a step, before any change."""

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        """Called before the training forward of a microbatch."""

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        """Called after the training forward of a microbatch and its loss, which is 0 with `step.gather: global`."""

    def end_gradients(self, engine: Engine) -> None:
        """Called when each `.grad` is the gradient of the mean loss of the global batch, before clipping."""

    def end_step(self, engine: Engine, result: StepResult) -> None:
        """Called at the end of a step."""

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        """Called at the end of an evaluation."""

    def checkpoint_saved(self, step: int, path: Path, is_best: bool) -> None:
        """Called on rank 0 when a checkpoint of a `CheckpointManager` is complete, for the callbacks of the world."""


def of_microbatches(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with a hook for each microbatch; without any, microbatches may be computed together."""
    hooks = (Callback.begin_microbatch, Callback.end_microbatch)
    return [c for c in callbacks if (type(c).begin_microbatch, type(c).end_microbatch) != hooks]


class Intervention(Callback):
    """Callback that changes the model or the configuration of an engine, for an experiment of `samestep verify`."""

    def prepare(self, model: torch.nn.Module, config: StepConfig) -> StepConfig:
        """Change `model` in place before construction, and return the configuration to use."""
        return config


class TrainingValues(Callback):
    """Mean loss and metrics of the outputs of training steps, without those of skipped and failed steps.

    The user's own metric objects have no function that drops an update: they include these steps.

    Args:
        metrics: metrics that no evaluation uses at the same time.
    """

    def __init__(self, metrics: Sequence[Metric | LossMetric]) -> None:
        self._metrics = metrics
        self._droppable = [m for m in metrics if isinstance(m, CountMetric | FunctionMetric | TorchMetric)]
        self._sum = self._count = 0.0
        self._drops = list[Callable[[], None]]()  # of the present step

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        self._drop_step()
        self._drops = [metric.mark() for metric in self._droppable]

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        if not microbatch.size:
            return
        targets = microbatch.pair[1]
        require_outputs(outputs, targets, self._metrics)
        outputs = move_next_to(map_tensors(outputs, torch.Tensor.detach), targets)
        for metric in self._metrics:
            if not isinstance(metric, LossMetric):
                metric.update(outputs, targets)

    def end_step(self, engine: Engine, result: StepResult) -> None:
        if result.skipped:
            self._drop_step()
            return
        self._drops = []
        self._sum += result.loss * result.count
        self._count += result.count

    def take(self, world: World) -> dict[str, float]:
        """Return `loss` and the metrics of the steps since the last call; a collective."""
        self._drop_step()
        values = {"loss": self._sum / self._count if self._count else math.nan}
        self._sum = self._count = 0.0
        return values | {
            metric.name: metric.function(values["loss"]) if isinstance(metric, LossMetric) else metric.compute(world)
            for metric in self._metrics
        }

    def _drop_step(self) -> None:
        """Drop the updates of a step that was skipped or has failed."""
        while self._drops:
            self._drops.pop()()
