"""Checkpoints of the training of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from samestep.checkpoint.background_writer import SavedCheckpoint
from samestep.checkpoint.contents import Progress
from samestep.checkpoint.loop import LoopCheckpoints
from samestep.checkpoint.resume_changes import require_unchanged_settings, setting_changes
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import Recipe, RunOptions
from samestep.config.validation import require
from samestep.distributed.devices import machine
from samestep.errors import CheckpointWriteError, InputError
from samestep.loggers.logger import RunLogger
from samestep.metrics.metrics import BestRule
from samestep.number_text import plural
from samestep.recipes.builder import Built
from samestep.recipes.optimizers import apply_schedule
from samestep.recipes.recipe_files import recipe_data
from samestep.recipes.training_step import StepResult


class RecipeCheckpoints(LoopCheckpoints):
    """Checkpoints of a recipe: also the recipe, facts of its data, and the mean of the epoch.

    Use this object as a context manager around the loop: the end of the block waits for the last
    checkpoint.

    Args:
        folder: folder of the checkpoints.
        built: objects of the recipe.
        recipe: the recipe, which every checkpoint contains.
        options: number of steps between checkpoints.
        logger: receives the events.

    Attributes:
        recipe: resolved recipe as plain data.
        skipped_steps: steps of the run without an update.
        best_epoch: epochs before the evaluation with the best value.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        built: Built,
        recipe: Recipe,
        options: RunOptions,
        logger: RunLogger,
    ) -> None:
        super().__init__(folder, {"": built.driver}, {"": built.train}, {}, self._log_saved)
        self._rule = BestRule.of(recipe.best_by, recipe.best_mode, recipe.metrics)
        self.recipe = recipe_data(recipe)
        self.skipped_steps = 0
        self.best_epoch = 0
        self._driver = built.driver
        self._batches = built.train
        self._facts = built.splits.facts
        self._logger = logger
        self._loss_sum = 0.0
        self._loss_count = 0.0
        self._hits = torch.zeros(len(self._driver.accuracies), 2, dtype=torch.float64)
        self._accepted_changes: list[str] = []
        self._notes: list[str] = []
        self._every = options.checkpoint_every

    @property
    def best_by(self) -> str:
        """Name of the deciding metric."""
        return self._rule.by

    @property
    def summary(self) -> dict[str, Any]:
        """Skipped steps, and the best result: its value, metric and epoch."""
        best = {"best": self._best, "best_by": self.best_by, "best_epoch": self.best_epoch}
        return {"skipped_steps": self.skipped_steps, **best}

    @property
    def patience_is_over(self) -> bool:
        """Whether the epochs of `stop.patience` have passed without a better result."""
        patience = (self.recipe["stop"] or {}).get("patience", math.inf)
        epochs = self._batches.cursor.epoch - self.best_epoch
        # An evaluation that is due can still have a better result.
        return epochs >= patience and not self.awaits_evaluation

    @property
    def train_values(self) -> dict[str, float]:
        """`train_loss`, NaN without a loss, and accuracies of the steps of the epoch so far."""
        values = {"train_loss": math.nan}
        if self._loss_count:
            values["train_loss"] = self._loss_sum / self._loss_count
        for metric, hits in zip(self._driver.accuracies, self._hits, strict=True):
            if hits[1]:
                values[f"train_{metric.name}"] = metric.value(hits)
        return values

    @property
    def awaits_evaluation(self) -> bool:
        """Whether an epoch has all its steps but no evaluation, as after a stop request."""
        return bool(self._loss_count) and not self._batches.cursor.samples

    def _progress(self, name: str) -> Progress:
        cursor = self._batches.cursor
        return Progress(
            step=self._driver.steps,
            cursor=cursor,
            best=self._best,
            best_epoch=self.best_epoch,
            loss_sum=self._loss_sum,
            loss_count=self._loss_count,
            hits=self._hits.tolist(),
            skipped_steps=self.skipped_steps,
            recipe=self.recipe,
            data=self._data_settings(cursor.epoch),
            machine=machine(self._world.device),
        )

    def _data_settings(self, epoch: int) -> dict[str, Any]:
        """Return the settings and facts of the training data on which an epoch depends."""
        return {**self._batches.settings_of(epoch), **self._facts}

    def resume(self, path: Path, *, accept_changes: bool) -> None:
        """Resume from a checkpoint of any number of ranks.

        Raises:
            CheckpointError: the checkpoint is damaged, or belongs to another model.
            InputError: the data have changed, or `epochs` is too small.
        """
        self._require_equal_checkpoint(path)
        saved = self._read(path)
        progress = saved[""].progress
        cursor = progress.cursor
        epochs = self.recipe["epochs"]
        require(
            cursor.epoch <= epochs,
            f"epochs is {epochs}, and {path} has {plural(cursor.epoch, 'epoch')}",
            "at least the epochs that are complete",
            f"epochs={cursor.epoch} or more",
        )
        settings = self._data_settings(cursor.epoch)
        changes = list(setting_changes("training data", progress.data, settings))
        require_unchanged_settings(changes, accept_changes=accept_changes)
        # Until here nothing has changed, so that an error leaves the objects as they were.
        self._load(path, saved)
        self._loss_sum = progress.loss_sum
        self._loss_count = progress.loss_count
        self._hits = torch.tensor(progress.hits, dtype=torch.float64).view(-1, 2)
        self.skipped_steps = progress.skipped_steps
        self.best_epoch = progress.best_epoch
        self._accepted_changes = changes
        self._notes = self._machine_changes(saved)
        before = progress.recipe.get("epochs", epochs)
        if before != epochs and isinstance(self._driver.scheduler, LambdaLR):
            apply_schedule(self._driver.scheduler)  # the schedule depends on the number of epochs
        # Other keys may have new defaults in this version: they stay as they were.
        self.recipe = {**progress.recipe, "epochs": epochs, "stop": self.recipe["stop"]}
        self._log_resumption(before)

    def _log_resumption(self, epochs_before: int) -> None:
        cursor = self._batches.cursor
        step = self._driver.steps
        epochs = self.recipe["epochs"]
        if self.awaits_evaluation:
            position = f"evaluation of epoch {cursor.epoch}/{epochs}"
        elif cursor.epoch >= epochs:
            position = f"the run is complete ({plural(epochs, 'epoch')}); epochs=N adds epochs"
        else:
            next_step = cursor.samples // self._batches.batch_size + 1
            position = f"epoch {cursor.epoch + 1}/{epochs}, step {next_step}/{len(self._batches)}"
        text = f"resuming after step {step}: {position}"
        if epochs_before != epochs:
            text += f" (before: {plural(epochs_before, 'epoch')})"
        self._logger.log_event(
            "resume", step=step, epoch=cursor.epoch, samples=cursor.samples, text=text
        )
        for change in (*self._notes, *self._accepted_changes):
            self._logger.log_event("note", text=f"continuing with a change: {change}")

    def begin(self) -> None:
        """Save if the data have changed since the checkpoint.

        An automatic restart compares the data with those that were accepted.
        """
        if self._accepted_changes:
            self.save()

    def add(self, result: StepResult) -> None:
        """Add the result of a step to the mean of the epoch, and report a finished checkpoint."""
        self.skipped_steps += result.skipped
        if not result.skipped and result.weight:
            self._loss_sum += result.loss * result.weight
            self._loss_count += result.weight
            self._hits += result.hits
        self._writer.poll()

    @property
    def is_due(self) -> bool:
        """Whether to save after the step of the batch that was read last."""
        # The end of an epoch is saved after the evaluation, which can make the checkpoint the best.
        ends_epoch = not self._batches.cursor.samples
        step = self._driver.steps + 1  # the step of this batch is not counted yet
        return self._every is not None and not ends_epoch and step % self._every == 0

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether the results of an evaluation are the best so far."""
        return self._rule.is_best(values, self._best)

    def save(self, values: Mapping[str, float] | None = None) -> None:
        """Save the state, at the end of an epoch with the `values` of its evaluation.

        Call this on every rank; rank 0 writes, in the background.
        """
        epoch = None
        is_best = False
        if values is not None:
            epoch = self._batches.cursor.epoch
            is_best = self.is_best(values)
            # The mean of the epoch ends here: a checkpoint of the next epoch begins with none.
            self._loss_sum = 0.0
            self._loss_count = 0.0
            self._hits.zero_()
        if values is not None and is_best:
            self._best = values[self._rule.by]
            self.best_epoch = self._batches.cursor.epoch
        self._write(is_best=is_best, epoch=epoch)

    @contextmanager
    def saved_on_bad_data(self) -> Iterator[None]:
        """Save before the error of a bad sample, if rank 0 holds the complete state.

        Other ranks need not have the error, so that no rank can take part in gathering.
        """
        try:
            yield
        except InputError as error:
            is_divided = self._driver.local_parameters.is_divided
            # Not before the first step: the seed gives the same state.
            if self._driver.steps and not is_divided and self._world.is_main:
                try:
                    self.save()
                    self._writer.wait()
                except CheckpointWriteError as failure:
                    error.add_note(str(failure))
            raise

    def _log_saved(self, saved: SavedCheckpoint) -> None:
        self._logger.log_event(
            "checkpoint", step=saved.step, path=saved.path.name, is_best=saved.is_best
        )
