"""Learning rates of a training loop, which change between two global batches only."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.integrations.torch_loader import integration_error


class ScheduleCheck:
    """Check that no scheduler makes a step within a global batch.

    A scheduler that makes one per microbatch can change the rate between two batches only, so steps are compared too.

    Args:
        optimizers: the optimizers; their schedulers, prepared or not, exist already.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers, own = optimizers, {id(optimizer) for optimizer in optimizers}
        # An optimizer has no list of its schedulers.
        schedulers = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
        self._schedulers = [scheduler for scheduler in schedulers if id(_optimizer_of(scheduler)) in own]
        self._before: list[Any] = []

    def begin(self) -> None:
        """Record steps and rates at the beginning of a global batch."""
        self._before = self._read()

    def require_unchanged(self) -> None:
        """Compare steps and rates with those at the beginning of the global batch.

        Raises:
            InputError: they have changed.
        """
        if self._read() != self._before:
            raise integration_error(
                "a scheduler made a step, or the learning rate changed, within a global batch",
                "one step of a scheduler per optimizer step; the body of the loop runs once per microbatch",
                "prepare the scheduler, or step it `if accelerator.sync_gradients:`",
            )

    def _read(self) -> list[Any]:
        return [*learning_rates(self._optimizers), *(scheduler.last_epoch for scheduler in self._schedulers)]


def learning_rates(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the learning rate of each group of parameters; None for a group without one, as of Adafactor."""
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


def _optimizer_of(scheduler: LRScheduler) -> Optimizer | None:
    optimizer: Optimizer | None = getattr(scheduler, "optimizer", None)
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
