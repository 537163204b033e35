"""Signals that Lightning handles in a training, deferred to the end of a step, at which ranks agree on them."""

from __future__ import annotations

import signal
from types import FrameType

from lightning.pytorch import Trainer

from samestep.distributed.world import World
from samestep.engine.step_stats import StepResult


class TrainingSignals:
    """Replaces two handlers of a trainer: those of SIGTERM, and of the signal before Slurm requeues the job.

    Lightning's handlers communicate and save at once, within a step in which other ranks wait for other messages, or
    have not received the signal.

    Args:
        trainer: the trainer, which has not registered its handlers.
        world: the ranks.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        self._connector, self._stop = trainer._signal_connector, world.context.stop
        self._requeue = self._connector._slurm_sigusr_handler_fn  # save, and requeue the job
        self._stops = self._requeues = False  # on every rank
        self._handlers = {
            "_sigterm_notifier_fn": self._request_stop,
            "_slurm_sigusr_handler_fn": self._request_requeue,
        }
        self.requests_requeue = False  # on this rank, since the last step
        vars(self._connector).update(self._handlers)

    def end_step(self, result: StepResult) -> None:
        """Apply the requests of all ranks."""
        if result.stop:
            # Lightning raises `SIGTERMException` after the hooks and the validation that follow the batch.
            self._stops = self._connector.received_sigterm = True
        if result.save:
            self._requeues, self.requests_requeue = True, False

    def begin_batch(self) -> None:
        """Save a checkpoint and requeue the job, if a rank has requested it; a collective then."""
        if self._requeues:
            self._requeues = False
            self._requeue(signal.SIGUSR1, None)  # type: ignore[arg-type]

    def begin_validation(self) -> None:
        """Let a validation complete, which Lightning would end after its first batch."""
        self._connector.received_sigterm = False

    def end_validation(self) -> None:
        """Continue with a stop."""
        self._connector.received_sigterm = self._stops

    def remove(self) -> None:
        """Restore the handlers."""
        for name in self._handlers:
            vars(self._connector).pop(name, None)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop.number = self._stop.number or number

    def _request_requeue(self, number: int, frame: FrameType | None) -> None:
        self.requests_requeue = True
