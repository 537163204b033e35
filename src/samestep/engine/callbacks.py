"""Hooks of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.engine.loss import Loss
from samestep.engine.step_stats import StepResult

if TYPE_CHECKING:
    from samestep.engine.engine import Engine


class Callback:
    """Read-only hooks, called in the order of the methods; each does nothing by default."""

    def engine_created(self, engine: Engine) -> None:
        """Called at the end of the engine's construction."""

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        """Called at the beginning of a step, before any change."""

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        """Called before the training forward of a microbatch."""

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        """Called after the training forward of a microbatch and its loss."""

    def end_gradients(self, engine: Engine) -> None:
        """Called when each `.grad` is the gradient of the mean loss of the global batch, before clipping."""

    def end_step(self, engine: Engine, result: StepResult) -> None:
        """Called at the end of a step."""

    def end_evaluation(self, engine: Engine, values: dict[str, float]) -> None:
        """Called at the end of an evaluation."""


class Intervention(Callback):
    """Callback that changes the model or the configuration of an engine, for an experiment of `samestep verify`."""

    def prepare(self, model: torch.nn.Module, config: StepConfig) -> StepConfig:
        """Change `model` in place before construction, and return the configuration to use."""
        return config
