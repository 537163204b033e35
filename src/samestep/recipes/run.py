"""Training and evaluation of a recipe: the functions that every rank of a command runs.

Invalid files and options raise `InputError`; a damaged checkpoint, or one of another model, raises
`CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from samestep.checkpoint.durable_files import unsupported_features
from samestep.checkpoint.folder_lock import FolderLock
from samestep.checkpoint.state import load_model
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DEFAULT_KEEP, DEFAULT_PREFETCH, Recipe, RunOptions
from samestep.cursor import Cursor
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.world import World
from samestep.errors import DataError
from samestep.launcher.process_state import process_state
from samestep.loggers.logger import EVENTS, JsonlLogger, RunLogger
from samestep.loggers.rank_monitor import RankMonitor
from samestep.loggers.trackers import create_loggers
from samestep.parallelize import any_rank
from samestep.recipes.bad_samples import RecipeBatch, complete_epoch
from samestep.recipes.builder import Built, build, start_world, without_pretrained
from samestep.recipes.checkpoints import RecipeCheckpoints
from samestep.recipes.events import TrainingEvents
from samestep.recipes.models import load_all
from samestep.recipes.predict import evaluate_by_class, evaluated
from samestep.recipes.recipe_files import DatasetInfo, update_recipe, write_dataset_info
from samestep.runs.folder import append_start, environment, recorded_keep, require_same_code


def train(
    recipe: Recipe,
    options: RunOptions,
    run: Path,
    checkpoint: Path | None,
    first_step: int,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Train a recipe in a run directory, from the beginning or from a checkpoint.

    Args:
        recipe: the recipe.
        options: options that change no result.
        run: directory of the run.
        checkpoint: checkpoint of step `first_step`, or None.
        first_step: 0 without a checkpoint.
        accept_changes: code and training data may differ from those of the run so far.

    Returns:
        `stopped` on request, and `stop_signal`; `step` and `skipped_steps`; `has_failed` if most
        were skipped; the last `evaluation`, `train_` and `best` values; `seconds` and speed.
    """
    with (
        start_world(recipe, options) as world,
        # Rank 0 alone writes to the folder; other ranks would find the lock taken.
        FolderLock(run) if world.is_main else nullcontext(),
        RankMonitor(run, world, first_step) as monitor,
    ):
        changes: list[str] = []
        if world.is_main:
            # Before the data are read: changed code ends the run.
            changes = require_same_code(run, checkpoint, accept_changes=accept_changes)
        built = _build(recipe, options, world, run, is_new=checkpoint is None)
        folder, log, missing = _open_writers(run, options, world, first_step)
        checkpoints = RecipeCheckpoints(folder, built, recipe, options, log)
        events = TrainingEvents(log, built, recipe.epochs, options)
        # Before the record of the start: a resumption that is refused is no start.
        if checkpoint is not None:
            checkpoints.resume(checkpoint, accept_changes=accept_changes)
        if world.is_main:
            _record_start(run, built, world, recipe, first_step, folder.keep)
            for note in _notes(built, world, recipe, changes, missing, is_new=checkpoint is None):
                log.log_event("note", text=note)
        monitor.follow(lambda: events.rank_progress)
        with log:
            log.log_config(checkpoints.recipe)
            values, stopped = fit(built, recipe.epochs, checkpoints, events)
            events.log_end(stopped=stopped)
        return {
            "stopped": stopped,
            "stop_signal": world.session.stop.number,
            "step": built.driver.steps,
            "has_failed": 2 * checkpoints.skipped_steps > built.driver.steps,
            "evaluation": values,
            **checkpoints.summary,
            **events.train_values,
            "seconds": events.timer.elapsed,
            "samples_per_second": events.timer.speed,
        }


def fit(
    built: Built, epochs: int, checkpoints: RecipeCheckpoints, events: TrainingEvents
) -> tuple[dict[str, float], bool]:
    """Train until the end of the last epoch, or until a rank receives a stop request.

    Returns:
        The values of the last evaluation, empty without one; and whether the training was stopped.

    Raises:
        SamestepError: the run failed; existing checkpoints are unchanged.
    """
    events.log_begin()
    driver = built.driver
    world = driver.world
    batches = built.train
    values: dict[str, float] = {}
    stopped = False
    with checkpoints:  # waits for the last one before the result reports success
        checkpoints.begin()
        if not driver.steps:
            _try_evaluation(built, checkpoints)
        is_complete = batches.cursor.epoch >= epochs or checkpoints.patience_is_over
        if is_complete and not checkpoints.awaits_evaluation:
            # Nothing remains of a complete run, but its summary has the values of an evaluation.
            evaluation = _evaluate(built, checkpoints, events)
            stopped = evaluation is None
            values = evaluation or {}
        while not (stopped or checkpoints.patience_is_over) and (
            batches.cursor.epoch < epochs or checkpoints.awaits_evaluation
        ):
            for begin, batch in _rest_of_epoch(built, checkpoints, events):
                is_due = checkpoints.is_due
                samples = len(batch.samples)
                with (
                    world.session.status.operation(f"step {driver.steps + 1}"),
                    events.timer.step(samples, samples // world.size),
                ):
                    result = driver.step(batch)
                    # All ranks end after the same step, so that none waits for another.
                    stopped = any(any_rank(world, world.stop_requested))
                events.log_step(result, begin, batches)
                checkpoints.add(result)  # before a save, which contains the mean of the epoch
                if stopped:
                    break  # also after the last step: the resumed run starts with the evaluation
                if is_due:
                    checkpoints.save()
            else:
                evaluation = _evaluate(built, checkpoints, events)
                stopped = evaluation is None
                if evaluation is not None:
                    values = evaluation
                    events.log_epoch(values, checkpoints)  # before the save, which ends the mean
                    checkpoints.save(values)
                    if checkpoints.patience_is_over and batches.cursor.epoch < epochs:
                        events.log_early_stop(checkpoints)
        if stopped:
            checkpoints.save()
    return values, stopped


def _try_evaluation(built: Built, checkpoints: RecipeCheckpoints) -> None:
    """Evaluate one batch: an evaluation that cannot be computed must not cost an epoch."""
    first = islice(complete_epoch(built.evaluation), 1)
    names = built.driver.evaluate(first, built.metrics, is_trial=True)
    if names and "loss" in names:  # otherwise no sample of the batch can be used
        checkpoints.is_best(names)  # raises an error if there is no value `best_by`


def _rest_of_epoch(
    built: Built, checkpoints: RecipeCheckpoints, events: TrainingEvents
) -> Iterator[tuple[Cursor, RecipeBatch]]:
    """Yield the remaining batches of an epoch with their positions, and time the waits for them."""
    if checkpoints.awaits_evaluation:
        return
    batches = built.train
    iterator = iter(batches)
    is_read = False
    while not is_read:
        begin = batches.cursor
        with checkpoints.saved_on_bad_data(), events.timer.waits.wait():
            batch: RecipeBatch | None = next(iterator, None)
        if batch is None:
            return
        # Not until the loader ends: this would be one more wait.
        is_read = batches.cursor.epoch > begin.epoch
        events.read(batch)
        if batch.data is not None:
            yield begin, batch


def _evaluate(
    built: Built, checkpoints: RecipeCheckpoints, events: TrainingEvents
) -> dict[str, float] | None:
    """Return the values of an evaluation, or None on all ranks after a stop request."""
    driver = built.driver
    with (
        driver.world.session.status.operation("an evaluation"),
        checkpoints.saved_on_bad_data(),
    ):
        return driver.evaluate(events.evaluation_batches(), built.metrics, until_stop=True)


def _build(recipe: Recipe, options: RunOptions, world: World, run: Path, *, is_new: bool) -> Built:
    """Build the objects of a recipe; the events of a new run have the error if this fails."""
    loggers = []
    if is_new and world.is_main and "jsonl" in options.loggers:
        loggers = [JsonlLogger(run / EVENTS)]
    if not is_new:
        recipe = without_pretrained(recipe)
    with RunLogger(loggers):
        built = build(recipe, options, world)
    # After the build, which imports the modules that the recipe names.
    process_state.source_files.check_ranks(world)
    return built


def _open_writers(
    run: Path, options: RunOptions, world: World, first_step: int
) -> tuple[CheckpointFolder, RunLogger, list[str]]:
    """Return folder of checkpoints, logger and notes on the file system; only rank 0 writes."""
    if not world.is_main:
        return CheckpointFolder(run / "checkpoints", DEFAULT_KEEP), RunLogger(()), []
    # Without the option, a run keeps as many as at its last start.
    folder = CheckpointFolder(run / "checkpoints", options.keep or recorded_keep(run))
    held = HeldFolder(run)
    folder.hold(held)
    loggers = create_loggers(options.loggers, run, first_step=first_step, quiet=options.quiet)
    # Before the start is recorded: without an operation that a save needs, the run ends here.
    missing = [f"{run} is on a file system without {name}" for name in unsupported_features(run)]
    folder.clean()
    return folder, RunLogger(loggers, held), missing


def _record_start(
    run: Path, built: Built, world: World, recipe: Recipe, first_step: int, keep: int
) -> None:
    """Write the facts of a start to the run directory; call this on rank 0."""
    remark = None
    if world.mesh_shape.replicate > 1:
        remark = recipe.strategy.gradient_note
    start = environment(
        world,
        from_step=first_step,
        strategy=world.mesh_shape.name,
        remark=remark,
        threads=recipe.step.threads,
        workers=built.workers,
        prefetch=DEFAULT_PREFETCH,
        keep=keep,
    )
    append_start(run, start)
    info = DatasetInfo(built.splits.classes, built.splits.model_options)
    write_dataset_info(info, run)
    if first_step:
        update_recipe(run / "recipe.yaml", recipe)


def _notes(
    built: Built,
    world: World,
    recipe: Recipe,
    changes: list[str],
    missing: list[str],
    *,
    is_new: bool,
) -> list[str]:
    """Return notes on code, file system, weights, layout and learning rate for the log."""
    notes = [*(f"continuing with changed code: {change}" for change in changes), *missing]
    if is_new:
        notes += built.notes
    warmup = recipe.schedule.warmup_epochs
    if is_new and warmup > recipe.epochs:
        notes.append(
            f"warning: schedule.warmup_epochs is {warmup:g} and epochs is {recipe.epochs}: "
            "the learning rate does not reach its full value"
        )
    shape = world.mesh_shape
    if shape.splits_model:
        notes.append(shape.describe())
    if shape.replicate > 1 and recipe.strategy.gradient_note is not None:
        notes.append(recipe.strategy.gradient_note)
    return notes


def evaluate(
    recipe: Recipe,
    options: RunOptions,
    checkpoint: Path,
    report: Path | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint or a weights file, and return `loss`, `samples` and the metrics.

    Args:
        recipe: the recipe.
        options: options that change no result.
        checkpoint: folder of a checkpoint, or file of weights.
        report: folder for `overlays`, pictures of the first samples of a segmentation; the result
            then also has the confusion matrix as `by_class`.
        classes: classes of the run, which the data must have.

    Raises:
        DataError: the data have other classes.
    """
    with start_world(recipe, options) as world:
        # Without `ema`: the driver would evaluate an average of its own, that of initial weights.
        built = build(replace(without_pretrained(recipe), ema=None), options, world)
        own = built.splits.classes
        if classes is not None and list(own) != list(classes):
            raise DataError(
                f"the data have the classes {', '.join(own)}, the run has {', '.join(classes)}",
                expected="the classes of the run, in the same order",
                fix="set data.options.evaluation_path alone, so that the classes are those of the "
                "training data",
                code="E_CLASSES",
            )
        model = built.driver.model
        if checkpoint.is_dir():
            parameters = built.driver.local_parameters
            load_model(checkpoint, model, parameters, averaged=recipe.ema is not None)
        else:
            load_all(model, checkpoint)
        if report is not None:
            return evaluate_by_class(built, recipe, report / "overlays")
        return evaluated(built, built.metrics)
