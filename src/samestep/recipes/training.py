"""Training of a recipe: epochs, evaluation, checkpoints and logging around the steps of a driver."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.checksum import checksum_event
from samestep.checkpoint.contents import Progress, require_unchanged_settings, setting_changes
from samestep.checkpoint.state import load, snapshot
from samestep.checkpoint.store import CheckpointFolder
from samestep.checkpoint.writer import AsyncCheckpointWriter, SavedCheckpoint
from samestep.config import RunOptions
from samestep.config.validation import require
from samestep.data.whole_batches import WholeBatches
from samestep.distributed.status import WaitClock
from samestep.distributed.world import all_gather
from samestep.errors import CheckpointWriteError, InputError
from samestep.global_view import any_rank
from samestep.loggers.logger import Logger, RunLogger
from samestep.loggers.rank_monitor import RankProgress
from samestep.metrics.metrics import BestRule, LossMetric, Metric
from samestep.microbatches import Cursor, require_position
from samestep.recipes.driver import Driver, StepResult
from samestep.recipes.gpu_notes import memory_event
from samestep.recipes.optimizers import apply_schedule
from samestep.recipes.samples import RecipeBatch
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
        waits: waits for data.
    """

    def __init__(self, waits: WaitClock) -> None:
        self._began = time.perf_counter()
        self._samples = 0
        self._step_seconds = 0.0
        self.waits = waits
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
        if self._step_seconds:
            return self._samples / self._step_seconds
        return 0.0

    @property
    def last_wait(self) -> float:
        """Wait for the most recent batch."""
        return self.waits.last

    @property
    def data_seconds(self) -> float:
        """Total wait for data, including a wait in progress."""
        return self.waits.seconds

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

    The next checkpoint must be complete, not started, before the state of the previous one reaches
    the maximum age. The durations of steps and writes are predicted from the last step and the
    longest of the last few saves.

    Args:
        seconds: maximum lost work, or None for no bound.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._state_time = clock()
        self._is_exceeded = False
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


class EpochData(NamedTuple):
    """A loader of a recipe with counts.

    Attributes:
        batches: whole batches of an epoch, from the cursor.
        count_tokens: function from the data of a batch to its numbers of tokens and of positions
            with padding.
    """

    batches: WholeBatches
    count_tokens: Callable[[Any], tuple[Any, Any]] | None = None


class Trainer:
    """Trains for a number of epochs, with evaluation and a checkpoint after each epoch.

    Args:
        train: training data; its cursor is the cursor of the run.
        metrics: metrics of an evaluation.
        best: rule that selects the best checkpoint.
        recipe: resolved recipe, stored in every checkpoint.
        facts: facts of the training data that a resumption compares, in addition to the settings of
            the loader.
        take_cache_reports: function that returns the new reports of the cache of this rank's
            samples, if there is a cache on all ranks.
        loggers: destinations of metrics and events, used on rank 0 only. `fit` closes them.
    """

    def __init__(
        self,
        driver: Driver,
        train: EpochData,
        evaluation: EpochData,
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
        self._driver = driver
        self._world = driver.world
        self._data = train
        self._train = train.batches
        self._evaluation = evaluation
        self._metrics = metrics
        self.logger = RunLogger(loggers if self._world.is_main else (), folder.held)
        self._epochs = epochs
        self._best = best
        self._take_cache_reports = take_cache_reports
        self._facts = facts
        self._progress = Progress(step=0, recipe=recipe)
        self._continues_changed_data = False
        self._timer = StepTimer(WaitClock())
        self._interval = CheckpointInterval(options.max_lost_work)
        self._checkpoint_every = options.checkpoint_every
        is_whole = not driver.local_parameters.is_divided  # no checksums of divided parameters
        self._checksum_every = (
            options.checksum_every if is_whole and "jsonl" in options.loggers else 0
        )
        self._stop = False  # a rank received a stop request, in a step or in an evaluation
        self._evaluation_seconds = 0.0
        self._writer = AsyncCheckpointWriter(
            folder, self._log_checkpoint, self._world.context.status.heartbeat
        )
        self._last_evaluation: dict[str, float] = {}
        self._skipped: dict[str, list[str]] = {"training": [], "evaluation": []}
        self._counts = (0, 0, 0)  # samples, tokens and positions since the last evaluation

    @property
    def rank_progress(self) -> RankProgress:
        """Work of this rank; any thread may read it."""
        return RankProgress(
            self._progress.step, self._timer.local_samples, self._timer.data_seconds
        )

    def resume(self, checkpoint: Path, *, accept_changes: bool = False) -> None:
        """Resume from a checkpoint of any number of ranks; with `accept_changes`, the data may have changed since.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            InputError: the data have changed, or `epochs` is too small.
        """
        progress = load(checkpoint, self._driver.training)
        cursor = progress.cursor
        before = progress.recipe.get("epochs", self._epochs)
        require(
            cursor.epoch <= self._epochs,
            f"epochs is {self._epochs}, and {checkpoint} has {plural(cursor.epoch, 'epoch')}",
            "at least the epochs that are complete",
            f"--set epochs={cursor.epoch} or more",
        )
        changes = list(
            setting_changes("training data", progress.data, self._data_settings(cursor.epoch))
        )
        require_unchanged_settings(changes, is_main=False, accept_changes=accept_changes)
        self._continues_changed_data = bool(changes)
        require_position(cursor, self._train.samples_of(cursor.epoch), self._train.batch_size)
        if before != self._epochs and isinstance(self._driver.scheduler, LambdaLR):
            apply_schedule(self._driver.scheduler)
        self._progress = replace(progress, recipe={**progress.recipe, "epochs": self._epochs})
        self._driver.steps = progress.step
        self._train.cursor = cursor
        text = f"resuming after step {progress.step}: {self._position()}"
        if before != self._epochs:
            text += f" (before: {plural(before, 'epoch')})"
        self.logger.log_event(
            "resume", step=progress.step, epoch=cursor.epoch, samples=cursor.samples, text=text
        )
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
            return (
                f"the run is complete ({plural(self._epochs, 'epoch')}); --set epochs=N adds epochs"
            )
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
        is_read = False
        while not is_read:
            begin = self._train.cursor
            with self._save_on_bad_data(), self._timer.waits.wait():
                batch: RecipeBatch | None = next(batches, None)
            if batch is None:
                break
            end = self._train.cursor
            is_read = end.epoch > begin.epoch
            self._skipped["training"] += batch.skipped
            if batch.data is not None:
                self._step(batch, begin, end)
            if self._stop:
                return  # at the end of an epoch, the resumed run begins with the evaluation
        batches.close()  # type: ignore[attr-defined]
        self._end_epoch()

    def _step(self, batch: RecipeBatch, begin: Cursor, end: Cursor) -> None:
        """Train on a batch, log the step, and save a checkpoint if one is due."""
        ends_epoch = end.epoch > begin.epoch
        ahead = 2 * self._timer.last_step + (self._evaluation_seconds if ends_epoch else 0.0)
        save = self._world.is_main and self._interval.is_due(ahead)
        self._count(batch)
        samples = len(batch.samples)
        operation = self._world.context.status.operation(f"step {self._driver.steps + 1}")
        with operation, self._timer.step(samples, samples // self._world.size):
            result = self._driver.step(batch)
            self._stop, save = any_rank(self._world, self._world.stop_requested, save)
        self._end_step(result, begin, end)
        self._writer.poll()
        every = self._checkpoint_every
        if not self._stop and (
            save or (every is not None and not ends_epoch and result.step % every == 0)
        ):
            self._save()

    def _count(self, batch: RecipeBatch) -> None:
        if self._data.count_tokens is not None:
            samples, tokens, positions = self._counts
            more_tokens, more_positions = self._data.count_tokens(batch.data)
            self._counts = (
                samples + len(batch.samples),
                tokens + int(more_tokens),
                positions + int(more_positions),
            )

    @contextmanager
    def _save_on_bad_data(self) -> Iterator[None]:
        """Save a checkpoint before the error of a bad sample, if rank 0 holds the complete state."""
        try:
            yield
        except InputError as error:
            is_divided = self._driver.local_parameters.is_divided
            if self._progress.step and not is_divided and self._world.is_main:
                try:
                    self._write()
                    self._writer.wait()
                except CheckpointWriteError as failure:
                    error.add_note(str(failure))
            raise

    def _end_step(self, result: StepResult, begin: Cursor, end: Cursor) -> None:
        """Add the loss to the mean of the epoch, and log the step."""
        skipped_steps = self._progress.skipped_steps + result.skipped
        progress = replace(
            self._progress, step=result.step, cursor=end, skipped_steps=skipped_steps
        )
        if not result.skipped and result.weight:
            loss_sum = progress.loss_sum + result.loss * result.weight
            progress = replace(
                progress, loss_sum=loss_sum, loss_count=progress.loss_count + result.weight
            )
        self._progress = progress
        self.logger.log_event(
            "step",
            step=result.step,
            epoch=begin.epoch,
            step_in_epoch=begin.samples // self._train.batch_size + 1,
            steps_in_epoch=len(self._train),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            samples_per_second=round(self._timer.last_speed, 1),
            data_seconds=round(self._timer.last_wait, 6),
        )
        if self._checksum_every and result.step % self._checksum_every == 0:
            self.logger.log_event("checksum", **checksum_event(self._driver, end))

    def _end_epoch(self) -> None:
        """Evaluate, log and save, unless a stop request ends the evaluation."""
        values = self._evaluate()
        if values is None:
            return
        self._last_evaluation = values
        self._log_skipped("training")
        self._log_skipped("evaluation")
        self._log_cache()
        self._log_tokens()
        if (memory := memory_event(self._world)) is not None:
            self.logger.log_event("memory", step=self._progress.step, **memory)
        progress = self._progress
        is_best = self._best.is_best(values, progress.best)
        self.logger.log_event(
            "evaluation",
            step=progress.step,
            epoch=progress.cursor.epoch,
            epochs=self._epochs,
            train_loss=progress.loss_sum / progress.loss_count
            if progress.loss_count
            else float("nan"),
            is_best=is_best,
            skipped_steps=progress.skipped_steps,
            samples_per_second=round(self._timer.speed, 1),
            **values,
        )
        self._progress = replace(
            progress,
            best=values[self._best.by] if is_best else progress.best,
            loss_sum=0.0,
            loss_count=0.0,
        )
        self._save(is_best=is_best, epoch=progress.cursor.epoch)

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate, or return None on a stop request."""
        began = time.perf_counter()
        with self._world.context.status.operation("an evaluation"), self._save_on_bad_data():
            values = self._driver.evaluate(
                self._evaluation_batches(), self._metrics, until_stop=True
            )
        self._evaluation_seconds = time.perf_counter() - began
        self._stop = values is None
        return values

    def _evaluation_batches(self) -> Iterator[RecipeBatch]:
        """Yield the batches of an evaluation, and log the number of complete ones."""
        self._skipped["evaluation"] = []
        batches = self._evaluation.batches
        for done, batch in enumerate(complete_epoch(batches)):
            self.logger.log_progress("evaluation", done, len(batches))
            self._skipped["evaluation"] += batch.skipped
            if batch.data is not None:
                yield batch

    def _save(self, *, is_best: bool = False, epoch: int | None = None) -> None:
        if self._world.is_main:
            self._write(is_best=is_best, epoch=epoch)
        else:
            snapshot(self._driver.training, self._progress, None)

    def _write(self, *, is_best: bool = False, epoch: int | None = None) -> None:
        self._interval.begin_save()
        progress = replace(self._progress, data=self._data_settings(self._progress.cursor.epoch))
        files = partial(snapshot, self._driver.training, progress)
        self._writer.save(self._progress.step, files, is_best=is_best, epoch=epoch)

    def _log_checkpoint(self, saved: SavedCheckpoint) -> None:
        self._world.context.status.checkpoint_saved()
        if self._interval.end_save(saved.seconds):
            self.logger.log_event(
                "note", text=f"a save takes {saved.seconds:.1f} s: more than --max-lost-work allows"
            )
        self.logger.log_event(
            "checkpoint", step=saved.step, path=saved.path.name, is_best=saved.is_best
        )

    def _log_skipped(self, split: str) -> None:
        """Log the samples skipped since the last call."""
        samples = sorted(self._skipped[split])
        self._skipped[split] = []
        if samples:
            reasons = "; ".join(samples[:_MAX_SKIPPED_IN_TEXT])
            if len(samples) > _MAX_SKIPPED_IN_TEXT:
                reasons += f"; and {len(samples) - _MAX_SKIPPED_IN_TEXT} more"
            text = f"left out {plural(len(samples), 'sample')} of the {split} data: {reasons}"
            self.logger.log_event(
                "skipped", split=split, count=len(samples), samples=samples, text=text
            )

    def _log_cache(self) -> None:
        """Log the reports about the cache since the last call; a collective."""
        if self._take_cache_reports is None:
            return
        reports = all_gather(self._take_cache_reports(), self._world)
        for text in sorted({text for part in reports for text in part})[:_MAX_CACHE_REPORTS]:
            self.logger.log_event("cache", text=f"warning: {text}")

    def _log_tokens(self) -> None:
        """Log the tokens trained on since the last call."""
        samples, tokens, positions = self._counts
        self._counts = (0, 0, 0)
        if samples:
            values = {"samples": samples, "tokens": tokens, "padding": positions - tokens}
            speed = round(self._timer.speed * tokens / samples, 1)
            self.logger.log_event(
                "tokens", step=self._progress.step, **values, tokens_per_second=speed
            )

    def _summarize(self) -> Summary:
        stopped = self._stop
        progress = self._progress
        timer = self._timer
        step = progress.step
        skipped = progress.skipped_steps
        if stopped:
            self.logger.log_event("stop", step=step, text=f"stopped after step {step}")
        summary = Summary(
            stopped, step, skipped, self._last_evaluation, progress.best, timer.elapsed, timer.speed
        )
        self.logger.log_event("end", stopped=stopped, step=step, seconds=round(summary.seconds, 3))
        return summary


def complete_epoch(batches: WholeBatches) -> Generator[RecipeBatch]:
    """Yield all batches of the first epoch, for an evaluation."""
    batches.cursor = Cursor()
    yield from batches
