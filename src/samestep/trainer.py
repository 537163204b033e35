"""Training loop: epochs, evaluation, checkpoints and logging."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.compatibility import require_unchanged_settings, setting_changes
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.snapshot import AsyncCheckpointWriter, SavedCheckpoint
from samestep.checkpoint.state import load, snapshot
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import RunOptions
from samestep.config.validation import require
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.distributed.status import WaitClock
from samestep.distributed.world import all_gather
from samestep.engine.checksum import checksum_event
from samestep.engine.engine import Engine
from samestep.engine.learning_rate import apply_schedule
from samestep.engine.step_stats import StepResult
from samestep.errors import CheckpointWriteError, InputError
from samestep.loggers.logger import Logger, RunLogger
from samestep.loggers.rank_monitor import RankProgress
from samestep.metrics.metrics import BestRule, LossMetric, Metric
from samestep.microbatches import require_position
from samestep.runs.loop_events import ComputationLog
from samestep.units import plural

_MAX_SKIPPED_IN_TEXT = 5  # skipped samples in one line of text; the event has all of them

_REMEMBERED_SAVES = 8
_MAX_CACHE_REPORTS = 20  # per epoch; damage can concern all entries of a disk


@dataclass(frozen=True)
class Summary:
    """Result of a run.

    Attributes:
        stopped: the run ended on request, before its last epoch.
        step: optimizer steps of the run, skipped ones included.
        skipped_steps: steps of the run without an update, because loss or gradient was not finite.
        evaluation: last evaluation: `loss`, `samples` and the metrics; empty without an evaluation.
        best: best value of the deciding metric.
        seconds: wall time since the start or the resumption.
        samples_per_second: training samples per second of training, without evaluation.
    """

    stopped: bool
    step: int
    skipped_steps: int
    evaluation: dict[str, float]
    best: float | None
    seconds: float
    samples_per_second: float


class StepTimer:
    """Wall time of data loading and of optimizer steps, in seconds.

    Args:
        waits: waits of the loader for data.
    """

    def __init__(self, waits: WaitClock) -> None:
        self._began = time.perf_counter()
        self._samples, self._step_seconds = 0, 0.0
        self._data = waits
        self.last_step = 0.0  # most recent step, including the wait for data
        self.last_speed = 0.0  # samples per second of the most recent step
        self.local_samples = 0  # samples computed by this rank

    @property
    def elapsed(self) -> float:
        """Time since the construction of the timer."""
        return time.perf_counter() - self._began

    @property
    def speed(self) -> float:
        """Samples per second over all steps; 0 before the first step."""
        return self._samples / self._step_seconds if self._step_seconds else 0.0

    @property
    def last_wait(self) -> float:
        """Wait for the most recent batch."""
        return self._data.last

    @property
    def data_seconds(self) -> float:
        """Total wait for data, including a wait in progress."""
        return self._data.seconds

    @contextmanager
    def step(self, samples: int, local_samples: int = 0) -> Iterator[None]:
        """Time a step over `samples` samples, of which this rank computes `local_samples`."""
        began = time.perf_counter()
        yield
        self.local_samples += local_samples
        self.last_step = self.last_wait + time.perf_counter() - began
        self._samples += samples
        self._step_seconds += self.last_step
        self.last_speed = samples / self.last_step


class CheckpointInterval:
    """Times of checkpoints that bound the work lost by a kill.

    The next checkpoint must be complete, not started, before the state of the previous one reaches the maximum age. The
    durations of steps and writes are predicted from the last step and the longest of the last few saves.

    Args:
        seconds: maximum lost work, or None for no bound.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._state_time, self._is_exceeded = clock(), False
        self._durations: deque[float] = deque(maxlen=_REMEMBERED_SAVES)

    def is_due(self, ahead: float) -> bool:
        """Return whether to save at the next opportunity; the one after that is in `ahead` seconds."""
        if self._seconds is None:
            return False
        age = self._clock() - self._state_time
        return age + ahead + max(self._durations, default=0.0) >= self._seconds

    def begin_save(self) -> None:
        """Record the start of a save of the current state."""
        self._state_time = self._clock()

    def end_save(self, seconds: float) -> bool:
        """Record the end of a save; return whether its duration exceeds the bound for the first time."""
        self._durations.append(seconds)
        was_exceeded = self._is_exceeded
        self._is_exceeded = was_exceeded or seconds > (self._seconds or math.inf)
        return self._is_exceeded and not was_exceeded


class Trainer:
    """Trains for a number of epochs, with evaluation and a checkpoint after each epoch.

    Args:
        train: training data; its cursor is the cursor of the run.
        metrics: metrics of an evaluation.
        best: rule that selects the best checkpoint.
        recipe: resolved recipe, stored in every checkpoint.
        facts: facts of the training data that a resumption compares, in addition to the settings of the loader.
        take_cache_reports: function that returns the new reports of the cache of this rank's samples, if there is a
            cache on all ranks.
        loggers: destinations of metrics and events, used on rank 0 only. `fit` closes them.
    """

    def __init__(
        self,
        engine: Engine,
        train: Loader,
        evaluation: Loader,
        metrics: Sequence[Metric | LossMetric],
        *,
        best: BestRule,
        folder: CheckpointFolder,
        recipe: dict[str, Any],
        facts: Mapping[str, str],
        epochs: int,
        options: RunOptions,
        take_cache_reports: Callable[[], list[str]] | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self._engine, self._train, self._evaluation, self._metrics = engine, train, evaluation, metrics
        self.logger = RunLogger(loggers if engine.world.is_main else (), folder.held)
        self._epochs, self._best, self._take_cache_reports = epochs, best, take_cache_reports
        self._facts, self._progress = facts, Progress(step=0, recipe=recipe)
        self._continues_changed_data = False
        self._timer = StepTimer(train.waits)
        self._interval = CheckpointInterval(options.max_lost_work)
        self._checkpoint_every = options.checkpoint_every
        self._checksum_every = options.checksum_every if "jsonl" in options.loggers else 0
        self._computation = ComputationLog(self.logger)
        self._stop = False  # a rank received a stop request, in a step or in an evaluation
        self._evaluation_seconds = 0.0
        self._writer = AsyncCheckpointWriter(folder, self._log_checkpoint, engine.world.context.status.heartbeat)
        self._last_evaluation: dict[str, float] = {}

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        return RankProgress(self._progress.step, self._timer.local_samples, self._timer.data_seconds)

    def resume(self, checkpoint: Path, *, accept_changes: bool = False) -> None:
        """Resume from a checkpoint of any number of ranks; with `accept_changes`, the data may have changed since.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            InputError: the data have changed, or `epochs` is too small.
        """
        progress = load(checkpoint, self._engine.training)
        cursor, before = progress.cursor, progress.recipe.get("epochs", self._epochs)
        require(
            cursor.epoch <= self._epochs,
            f"epochs is {self._epochs}, and {checkpoint} has {plural(cursor.epoch, 'epoch')}",
            "at least the epochs that are complete",
            f"--set epochs={cursor.epoch} or more",
        )
        changes = list(setting_changes("training data", progress.data, self._data_settings(cursor.epoch)))
        require_unchanged_settings(changes, is_main=False, accept_changes=accept_changes)
        self._continues_changed_data = bool(changes)
        require_position(cursor, self._train.samples_of(cursor.epoch), self._train.batch_size)
        if before != self._epochs and isinstance(self._engine.scheduler, LambdaLR):
            apply_schedule(self._engine.scheduler)
        self._progress = replace(progress, recipe={**progress.recipe, "epochs": self._epochs})
        self._engine.steps = progress.step
        self._train.cursor = cursor
        text = f"resuming after step {progress.step}: {self._position()}"
        if before != self._epochs:
            text += f" (before: {plural(before, 'epoch')})"
        self.logger.log_event("resume", step=progress.step, epoch=cursor.epoch, samples=cursor.samples, text=text)
        for change in changes:
            self.logger.log_event("note", text=f"continuing with a change: {change}")

    def _data_settings(self, epoch: int) -> dict[str, Any]:
        """Return the settings and facts of the training data on which the batches of an epoch depend."""
        return {**self._train.settings_of(epoch), **self._facts}

    def _position(self) -> str:
        """Return the next work of a resumed run."""
        cursor = self._progress.cursor
        if self._ends_with_evaluation:
            return f"evaluation of epoch {cursor.epoch}/{self._epochs}"
        if cursor.epoch >= self._epochs:
            return f"the run is complete ({plural(self._epochs, 'epoch')}); --set epochs=N adds epochs"
        step = cursor.samples // self._train.batch_size + 1
        return f"epoch {cursor.epoch + 1}/{self._epochs}, step {step}/{len(self._train)}"

    @property
    def _ends_with_evaluation(self) -> bool:
        """Whether an epoch has all its steps but no evaluation."""
        return bool(self._progress.loss_count) and not self._progress.cursor.samples

    def fit(self) -> Summary:
        """Train until the end of the last epoch, or until a rank receives a stop request.

        Raises:
            SamestepError: the run failed; existing checkpoints are unchanged.
        """
        with self.logger:
            self.logger.log_config(self._progress.recipe)
            self._interval.begin_save()
            with self._writer:
                if self._continues_changed_data:
                    self._save()  # an automatic restart compares the data with those that were accepted
                if self._ends_with_evaluation:
                    self._end_epoch()
                elif self._progress.cursor.epoch >= self._epochs:
                    self._last_evaluation = self._evaluate() or {}
                while self._progress.cursor.epoch < self._epochs and not self._stop:
                    self._train_epoch()
                if self._stop:
                    self._save()
                self._writer.wait()  # before the summary reports success
            return self._summarize()

    def _train_epoch(self) -> None:
        """Train the rest of an epoch, then evaluate."""
        batches = iter(self._train)
        while True:
            with self._save_on_bad_data():
                batch = next(batches, None)
            if batch is None:
                break
            ends_epoch = batch.end.epoch > batch.begin.epoch
            ahead = 2 * self._timer.last_step + (self._evaluation_seconds if ends_epoch else 0.0)
            save = self._engine.world.is_main and self._interval.is_due(ahead)
            with self._timer.step(batch.size, sum(part.size for part in batch.local_microbatches)):
                result = self._engine.step(batch, save=save)
            self._end_step(batch, result)
            self._writer.poll()
            if result.stop:
                self._stop = True
                return  # at the end of an epoch, the resumed run begins with the evaluation
            every = self._checkpoint_every
            if result.save or (every is not None and not ends_epoch and result.step % every == 0):
                self._save()
        self._end_epoch()

    @contextmanager
    def _save_on_bad_data(self) -> Iterator[None]:
        """Save a checkpoint on the rank with a bad sample, if every rank holds the complete state."""
        try:
            yield
        except InputError as error:
            if self._progress.step and not self._engine.local_parameters.is_divided:
                try:
                    self._write()
                    self._writer.wait()
                except CheckpointWriteError as failure:
                    error.add_note(str(failure))
            raise

    def _end_step(self, batch: GlobalBatch, result: StepResult) -> None:
        """Add the loss to the mean of the epoch, and log the step."""
        skipped_steps = self._progress.skipped_steps + result.skipped
        progress = replace(self._progress, step=result.step, cursor=batch.end, skipped_steps=skipped_steps)
        if not result.skipped and result.count:
            loss_sum = progress.loss_sum + result.loss * result.count
            progress = replace(progress, loss_sum=loss_sum, loss_count=progress.loss_count + result.count)
        self._progress = progress
        self.logger.log_event(
            "step",
            step=result.step,
            epoch=batch.begin.epoch,
            step_in_epoch=batch.begin.samples // self._train.batch_size + 1,
            steps_in_epoch=len(self._train),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            samples_per_second=round(self._timer.last_speed, 1),
            data_seconds=round(self._timer.last_wait, 6),
        )
        self._computation.end_step(self._engine, result.step)
        if self._checksum_every and result.step % self._checksum_every == 0:
            self.logger.log_event("checksum", **checksum_event(self._engine, batch.end))

    def _end_epoch(self) -> None:
        """Evaluate, log and save, unless a stop request ends the evaluation."""
        values = self._evaluate()
        if values is None:
            return
        self._last_evaluation = values
        self._log_skipped("training", self._train)
        self._log_skipped("evaluation", self._evaluation)
        self._log_cache()
        self._log_tokens()
        progress = self._progress
        is_best = self._best.is_best(values, progress.best)
        self.logger.log_event(
            "evaluation",
            step=progress.step,
            epoch=progress.cursor.epoch,
            epochs=self._epochs,
            train_loss=progress.loss_sum / progress.loss_count if progress.loss_count else float("nan"),
            is_best=is_best,
            skipped_steps=progress.skipped_steps,
            samples_per_second=round(self._timer.speed, 1),
            **values,
        )
        self._progress = replace(
            progress, best=values[self._best.by] if is_best else progress.best, loss_sum=0.0, loss_count=0.0
        )
        self._save(is_best=is_best, epoch=progress.cursor.epoch)

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate, or return None on a stop request."""
        began = time.perf_counter()
        with self._save_on_bad_data():
            values = self._engine.evaluate_until_stop(self._evaluation_batches(), self._metrics)
        self._evaluation_seconds = time.perf_counter() - began
        self._stop = values is None
        return values

    def _evaluation_batches(self) -> Iterator[GlobalBatch]:
        """Yield the batches of an evaluation, and log the number of complete ones."""
        for done, batch in enumerate(self._evaluation):
            self.logger.log_progress("evaluation", done, len(self._evaluation))
            yield batch

    def _save(self, *, is_best: bool = False, epoch: int | None = None) -> None:
        self._engine.check()  # with consistency checks, a checkpoint holds the state of all ranks
        if self._engine.world.is_main:
            self._write(is_best=is_best, epoch=epoch)
        else:
            snapshot(self._engine.training, self._progress, None)

    def _write(self, *, is_best: bool = False, epoch: int | None = None) -> None:
        self._interval.begin_save()
        progress = replace(self._progress, data=self._data_settings(self._progress.cursor.epoch))
        files = partial(snapshot, self._engine.training, progress)
        self._writer.save(self._progress.step, files, is_best=is_best, epoch=epoch)

    def _log_checkpoint(self, saved: SavedCheckpoint) -> None:
        self._engine.world.context.status.checkpoint_saved()
        if self._interval.end_save(saved.seconds):
            self.logger.log_event("note", text=f"a save takes {saved.seconds:.1f} s: more than --max-lost-work allows")
        self.logger.log_event("checkpoint", step=saved.step, path=saved.path.name, is_best=saved.is_best)

    def _log_skipped(self, split: str, data: Loader) -> None:
        """Log the samples skipped since the last call; a collective."""
        if not data.skips:
            return
        samples = sorted(sample for part in all_gather(data.skipped, self._engine.world.data) for sample in part)
        data.skipped.clear()
        if samples:
            reasons = "; ".join(samples[:_MAX_SKIPPED_IN_TEXT])
            if len(samples) > _MAX_SKIPPED_IN_TEXT:
                reasons += f"; and {len(samples) - _MAX_SKIPPED_IN_TEXT} more"
            text = f"left out {plural(len(samples), 'sample')} of the {split} data: {reasons}"
            self.logger.log_event("skipped", split=split, count=len(samples), samples=samples, text=text)

    def _log_cache(self) -> None:
        """Log the reports about the cache since the last call; a collective."""
        if self._take_cache_reports is None:
            return
        reports = all_gather(self._take_cache_reports(), self._engine.world.data)
        for text in sorted({text for part in reports for text in part})[:_MAX_CACHE_REPORTS]:
            self.logger.log_event("cache", text=f"warning: {text}")

    def _log_tokens(self) -> None:
        """Log the tokens trained on since the last call; a collective."""
        if not self._train.counts_tokens:
            return
        counts = all_gather(self._train.take_counts(), self._engine.world.data)
        samples, tokens, positions = (sum(column) for column in zip(*counts, strict=True))
        if samples:
            values = {"samples": samples, "tokens": tokens, "padding": positions - tokens}
            speed = round(self._timer.speed * tokens / samples, 1)
            self.logger.log_event("tokens", step=self._progress.step, **values, tokens_per_second=speed)

    def _summarize(self) -> Summary:
        stopped, progress, timer = self._stop, self._progress, self._timer
        step, skipped = progress.step, progress.skipped_steps
        if stopped:
            self.logger.log_event("stop", step=step, text=f"stopped after step {step}")
        summary = Summary(stopped, step, skipped, self._last_evaluation, progress.best, timer.elapsed, timer.speed)
        self.logger.log_event("end", stopped=stopped, step=step, seconds=round(summary.seconds, 3))
        return summary
