"""Epochs: steps, evaluation, checkpoints, and what is told of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.background import Saved, Saver
from samestep.checkpoint.loss_bound import LossBound
from samestep.checkpoint.state import Progress, load, pack
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import RunOptions
from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.engine.evaluation import Metric
from samestep.engine.result import StepResult
from samestep.engine.step import Engine
from samestep.errors import CheckpointWriteError, InputError
from samestep.metrics import LossMetric
from samestep.record.events import Recorder
from samestep.record.stopwatch import Stopwatch
from samestep.record.vitals import Done
from samestep.runtime.gather import all_gather

# Samples that were left out, in a line on the terminal; all of them are in the events.
_NAMED = 5


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        stopped: it was asked to end before its last epoch.
        step: optimizer steps done, in all.
        evaluation: the last evaluation: `loss`, `samples` and the metrics; empty if there was none.
        best: the best value of the deciding metric.
        seconds: wall time of this part of the run.
        samples_per_second: training samples over the time spent on training, evaluation aside.
    """

    stopped: bool
    step: int
    evaluation: dict[str, float]
    best: float | None
    seconds: float
    samples_per_second: float


class Trainer:
    """Runs a recipe's epochs with an engine.

    Args:
        engine: makes the steps.
        train: the training data; its cursor is the run's.
        evaluation: the evaluation data.
        metrics: what evaluation computes; the first decides what is best (higher is better), the loss if there is none
            or the first follows from the loss.
        folder: where checkpoints go.
        recorder: hears events.
        recipe: the resolved recipe, kept in every checkpoint.
        epochs: how many.
    """

    def __init__(
        self,
        engine: Engine,
        train: Loader,
        evaluation: Loader,
        metrics: list[Metric],
        *,
        folder: CheckpointFolder,
        recorder: Recorder,
        recipe: dict[str, Any],
        epochs: int,
        options: RunOptions,
    ) -> None:
        self._engine, self._train, self._evaluation, self._metrics = engine, train, evaluation, metrics
        self._recorder, self._epochs, self._options = recorder, epochs, options
        self._progress = Progress(recipe=recipe)
        self._stopwatch = Stopwatch()
        self._saver = Saver(folder, self._tell_saved, engine.world.pulse.tick)
        self._bound = LossBound(options.lose_at_most)
        self._evaluation_seconds = 0.0
        self._last_evaluation: dict[str, float] = {}

    @property
    def done(self) -> Done:
        """What this rank has done so far; any thread may ask."""
        return Done(self._progress.step, self._stopwatch.own_samples, self._stopwatch.waited)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, whatever number of ranks wrote it.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        self._progress = load(checkpoint, self._engine.training)
        self._engine.steps = self._progress.step
        self._train.cursor = self._progress.cursor
        self._recorder.tell("resume", step=self._progress.step, **_position(self._progress.cursor))

    def fit(self) -> Summary:
        """Train to the last epoch, or until somebody asks the run to end.

        Raises:
            SamestepError: the run failed; the newest checkpoint is as good as it was.
        """
        self._bound.begin_save()
        with self._saver:
            stopped = self._catch_up()
            while self._progress.cursor.epoch < self._epochs and not stopped:
                stopped = self._epoch()
            if stopped:
                self._save()
            self._saver.wait()  # before anybody is told that the run is done
        if stopped:
            self._recorder.tell("stop", step=self._progress.step, text=f"stopped after step {self._progress.step}")
        summary = self._summary(stopped=stopped)
        self._recorder.tell("end", stopped=stopped, step=summary.step, seconds=round(summary.seconds, 3))
        return summary

    def _catch_up(self) -> bool:
        """The evaluation that a resumed run begins with, if any; whether somebody asked to end."""
        if self._progress.loss_count and not self._progress.cursor.samples:
            return self._end_epoch()  # the run ended between the last step of an epoch and its evaluation
        if self._progress.cursor.epoch >= self._epochs:
            values = self._evaluate()
            self._last_evaluation = values or {}
            return values is None
        return False

    def _epoch(self) -> bool:
        """One epoch, or what is left of it; whether somebody asked to end."""
        batches = iter(self._train)
        every = self._options.checkpoint_every
        while (batch := self._next(batches)) is not None:
            is_last = batch.end.epoch > batch.begin.epoch
            with self._stopwatch.training(batch.size, own=sum(part.size for part in batch.parts)):
                result = self._engine.step(batch, save=self._wants_save(is_last))
            self._count(batch, result)
            self._saver.look()
            if result.stop:
                return True  # before the evaluation, if one is due: the run goes on with it
            if result.save or (every and result.step % every == 0 and not is_last):
                self._save()
        return self._end_epoch()

    def _wants_save(self, is_last: bool) -> bool:
        """Whether this rank wants a checkpoint after the step that comes, the last one of its epoch or not."""
        ahead = 2 * self._stopwatch.last_step + (self._evaluation_seconds if is_last else 0.0)
        return self._engine.world.is_main and self._bound.is_due(ahead)

    def _next(self, batches: Iterator[GlobalBatch]) -> GlobalBatch | None:
        with self._saving_when_data_is_bad(), self._stopwatch.waiting():
            return next(batches, None)

    @contextmanager
    def _saving_when_data_is_bad(self) -> Iterator[None]:
        """Bad data costs no work done: where a rank holds the whole state, the one that met it saves it."""
        try:
            yield
        except InputError as error:
            if self._progress.step and not self._engine.pieces.is_divided:
                try:
                    self._write(is_best=False)
                    self._saver.wait()
                except CheckpointWriteError as failure:
                    error.add_note(str(failure))
            raise

    def _count(self, batch: GlobalBatch, result: StepResult) -> None:
        progress = self._progress
        counted = 0.0 if result.skipped else result.count
        self._progress = replace(
            progress,
            step=result.step,
            cursor=batch.end,
            loss_sum=progress.loss_sum + (result.loss * counted if counted else 0.0),
            loss_count=progress.loss_count + counted,
        )
        self._recorder.tell(
            "step",
            step=result.step,
            epoch=batch.begin.epoch,
            step_in_epoch=batch.begin.samples // self._train.batch_size + 1,
            steps_in_epoch=len(self._train),
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            samples_per_second=round(self._stopwatch.last_speed, 1),
            data_seconds=round(self._stopwatch.last_wait, 6),
        )

    def _end_epoch(self) -> bool:
        """Evaluate and save; whether somebody asked to end before that was done."""
        values = self._evaluate()
        if values is None:
            return True
        self._last_evaluation = values
        self._tell_skipped("training", self._train)
        self._tell_skipped("evaluation", self._evaluation)
        self._tell_tokens()
        is_best = self._is_best(values)
        progress = self._progress
        self._recorder.tell(
            "evaluation",
            step=progress.step,
            epoch=progress.cursor.epoch,
            epochs=self._epochs,
            train_loss=progress.loss_sum / progress.loss_count if progress.loss_count else float("nan"),
            is_best=is_best,
            samples_per_second=round(self._stopwatch.speed, 1),
            **values,
        )
        best = self._deciding(values) if is_best else progress.best
        self._progress = replace(progress, best=best, loss_sum=0.0, loss_count=0.0)
        self._save(is_best=is_best)
        return False

    def _tell_skipped(self, which: str, data: Loader) -> None:
        """Name the samples that were left out since this was last told; every rank calls it."""
        if not data.skips:
            return
        found = [text for texts in all_gather(data.skipped, self._engine.world.data) for text in texts]
        data.skipped.clear()
        if found:
            count = f"{len(found)} sample{'s' if len(found) > 1 else ''} of the {which} data"
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            text = f"left out {count}: {'; '.join(sorted(found)[:_NAMED])}{more}"
            self._recorder.tell("skipped", split=which, count=len(found), samples=sorted(found), text=text)

    def _tell_tokens(self) -> None:
        """What texts were made of since this was last told; every rank calls it."""
        if not self._train.counts_tokens:
            return
        found = all_gather(self._train.take_counts(), self._engine.world.data)
        samples, tokens, places = (sum(column) for column in zip(*found, strict=True))
        if samples:
            speed = self._stopwatch.speed * tokens / samples
            facts = {"samples": samples, "tokens": tokens, "padding": places - tokens}
            self._recorder.tell("tokens", step=self._progress.step, **facts, tokens_per_second=round(speed, 1))

    def _evaluate(self) -> dict[str, float] | None:
        self._evaluation.cursor = Cursor()
        began = time.perf_counter()
        with self._saving_when_data_is_bad():
            values = self._engine.evaluate_until_stop(self._evaluation, self._metrics)
        self._evaluation_seconds = time.perf_counter() - began
        return values

    def _deciding(self, values: dict[str, float]) -> float:
        first = next(iter(self._metrics), None)
        return -values["loss"] if first is None or isinstance(first, LossMetric) else values[first.name]

    def _is_best(self, values: dict[str, float]) -> bool:
        value = self._deciding(values)
        return not math.isnan(value) and (self._progress.best is None or value > self._progress.best)

    def _save(self, *, is_best: bool = False) -> None:
        self._engine.check()  # what is saved as good is what all ranks hold, in a run that is checked
        if self._engine.world.is_main:
            self._write(is_best=is_best)
        else:
            pack(self._engine.training, self._progress, keep=False)

    def _write(self, *, is_best: bool) -> None:
        self._bound.begin_save()
        self._saver.save(self._progress.step, lambda: pack(self._engine.training, self._progress), is_best=is_best)

    def _tell_saved(self, saved: Saved) -> None:
        self._engine.world.pulse.save()
        if self._bound.end_save(saved.seconds):
            self._recorder.tell("note", text=f"a save takes {saved.seconds:.1f} s: more than --lose-at-most allows")
        self._recorder.tell("checkpoint", step=saved.step, path=saved.path.name, is_best=saved.is_best)

    def _summary(self, *, stopped: bool) -> Summary:
        watch = self._stopwatch
        best = self._progress.best
        return Summary(stopped, self._progress.step, self._last_evaluation, best, watch.elapsed, watch.speed)


def _position(cursor: Cursor) -> dict[str, int]:
    return {"epoch": cursor.epoch, "samples": cursor.samples}
