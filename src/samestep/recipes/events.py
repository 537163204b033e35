"""Events of the training of a recipe, and the times of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from samestep.checkpoint.checksum import checksum_event
from samestep.config import RunOptions
from samestep.cursor import Cursor
from samestep.data.whole_batches import WholeBatches
from samestep.distributed.devices import gpu_memory
from samestep.distributed.status import WaitClock
from samestep.distributed.world import World, all_gather
from samestep.loggers.logger import RunLogger
from samestep.loggers.rank_monitor import RankProgress
from samestep.number_text import format_bytes, plural
from samestep.recipes.bad_samples import RecipeBatch, complete_epoch
from samestep.recipes.builder import Built
from samestep.recipes.checkpoints import RecipeCheckpoints
from samestep.recipes.training_step import StepResult

_MAX_SKIPPED_IN_TEXT = 5  # skipped samples in one line of text; the event has all of them


class StepTimer:
    """Wall time of data loading and of optimizer steps, in seconds.

    Attributes:
        waits: waits for data, of which other threads may read the total.
        last_speed: samples per second of the most recent step.
        local_samples: samples computed by this rank.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._samples = 0
        self._step_seconds = 0.0
        self.waits = WaitClock()
        self.last_speed = 0.0
        self.local_samples = 0

    @property
    def elapsed(self) -> float:
        """Time since the construction of the timer."""
        return time.perf_counter() - self._began

    @property
    def speed(self) -> float:
        """Samples per second over all steps; 0 before the first step."""
        if self._step_seconds:
            return self._samples / self._step_seconds
        return 0.0

    @contextmanager
    def step(self, samples: int, local_samples: int) -> Iterator[None]:
        """Time a step over `samples` samples, of which this rank computes `local_samples`."""
        began = time.perf_counter()
        yield
        self.local_samples += local_samples
        # With the wait for the batch, as the clock on the wall has it.
        seconds = self.waits.last + time.perf_counter() - began
        self._samples += samples
        self._step_seconds += seconds
        self.last_speed = samples / seconds


class TrainingEvents:
    """Writes the events of a training; docs/reference/events.md lists them.

    Args:
        logger: logger of the run, which has no destination on ranks other than 0.
        built: objects of the recipe.
        epochs: epochs of the run.
        options: interval of checksums.

    Attributes:
        timer: times of the steps.
        train_values: `train_loss` and accuracies of the last complete epoch; None before.
    """

    def __init__(self, logger: RunLogger, built: Built, epochs: int, options: RunOptions) -> None:
        self.timer = StepTimer()
        self.train_values: dict[str, float | None] = {"train_loss": None}
        self._logger = logger
        self._built = built
        self._driver = built.driver
        self._epochs = epochs
        # Only rank 0 computes a checksum, and parts of a model are on other ranks.
        is_whole = not built.driver.local_parameters.is_divided
        # Not without the file of events: a checksum reads the whole state.
        has_file = "jsonl" in options.loggers
        self._checksum_every = options.checksum_every * (is_whole and has_file)
        self._skipped: dict[str, list[str]] = {"training": [], "evaluation": []}

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        timer = self.timer
        return RankProgress(self._driver.steps, timer.local_samples, timer.waits.seconds)

    def log_begin(self) -> None:
        """Show the position on the terminal before the first step, which can take long."""
        batches = self._built.train
        done = batches.cursor.samples // batches.batch_size
        self._logger.log_progress("starting", done, len(batches))

    def read(self, batch: RecipeBatch) -> None:
        """Note the samples of a training batch that were left out."""
        self._skipped["training"] += batch.skipped

    def log_step(self, result: StepResult, begin: Cursor, batches: WholeBatches) -> None:
        """Log a step whose batch starts at `begin`, and a checksum of the state in some steps."""
        self._logger.log_event(
            "step",
            step=result.step,
            epoch=begin.epoch,
            step_in_epoch=begin.samples // batches.batch_size + 1,
            steps_in_epoch=len(batches),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            samples_per_second=round(self.timer.last_speed, 1),
            data_seconds=round(self.timer.waits.last, 6),
        )
        if self._checksum_every and result.step % self._checksum_every == 0:
            self._logger.log_event("checksum", **checksum_event(self._driver, batches.cursor))

    def evaluation_batches(self) -> Iterator[RecipeBatch]:
        """Yield the batches of an evaluation, and log the number of complete ones."""
        # Of an evaluation that a stop request has ended, nothing is reported.
        self._skipped["evaluation"] = []
        batches = self._built.evaluation
        for done, batch in enumerate(complete_epoch(batches)):
            self._logger.log_progress("evaluation", done, len(batches))
            self._skipped["evaluation"] += batch.skipped
            yield batch
        self._logger.log_progress("evaluation", len(batches), len(batches))

    def log_epoch(self, values: dict[str, float], checkpoints: RecipeCheckpoints) -> None:
        """Log the end of an epoch, with the values of its evaluation; a collective."""
        step = self._driver.steps
        self.train_values = {**checkpoints.train_values}
        self._log_skipped("training")
        self._log_skipped("evaluation")
        if (memory := memory_event(self._driver.world)) is not None:
            self._logger.log_event("memory", step=step, **memory)
        self._logger.log_event(
            "evaluation",
            step=step,
            epoch=self._built.train.cursor.epoch,
            epochs=self._epochs,
            **self.train_values,
            is_best=checkpoints.is_best(values),
            skipped_steps=checkpoints.skipped_steps,
            samples_per_second=round(self.timer.speed, 1),
            **values,
        )

    def log_early_stop(self, checkpoints: RecipeCheckpoints) -> None:
        """Log that `stop.patience` ends the training."""
        epoch = self._built.train.cursor.epoch
        waited = plural(epoch - checkpoints.best_epoch, "epoch")
        text = f"early stop after epoch {epoch}: no better {checkpoints.best_by} for {waited}"
        self._logger.log_event("note", text=text)

    def _log_skipped(self, split: str) -> None:
        """Log the samples of a split that were left out since the last call."""
        samples = sorted(self._skipped[split])  # the order of an epoch is random
        self._skipped[split] = []
        if not samples:
            return
        reasons = "; ".join(samples[:_MAX_SKIPPED_IN_TEXT])
        if len(samples) > _MAX_SKIPPED_IN_TEXT:
            reasons += f"; and {len(samples) - _MAX_SKIPPED_IN_TEXT} more"
        text = f"left out {plural(len(samples), 'sample')} of the {split} data: {reasons}"
        self._logger.log_event(
            "skipped", split=split, count=len(samples), samples=samples, text=text
        )

    def log_end(self, *, stopped: bool) -> None:
        """Log the end of the run, which a stop request can have caused."""
        step = self._driver.steps
        if stopped:
            self._logger.log_event("stop", step=step, text=f"stopped after step {step}")
        seconds = round(self.timer.elapsed, 3)
        self._logger.log_event("end", stopped=stopped, step=step, seconds=seconds)


def memory_event(world: World) -> dict[str, Any] | None:
    """Return the event about memory of the rank with the highest peak; a collective.

    Returns:
        `peak_bytes`, of tensors of the process; `other_bytes`, which no tensor can have, as
        connections of NCCL take; `total_bytes`, of the device; and `text`. None without GPUs.
    """
    memory = gpu_memory()
    if memory is None:
        return None
    peak, other, total = max(all_gather([memory.peak, memory.other, memory.total], world))
    text = (
        f"GPU memory: peak {format_bytes(peak)} and {format_bytes(other)} for connections, "
        f"of {format_bytes(total)}"
    )
    return {"peak_bytes": peak, "other_bytes": other, "total_bytes": total, "text": text}
