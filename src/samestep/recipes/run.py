"""Training, evaluation and predictions of a recipe: the functions that every rank of a `samestep` command runs.

Invalid files and options raise `InputError`; a damaged checkpoint, or one of another model, raises
`CheckpointError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch

import samestep.checkpoint.state as checkpoints
from samestep.checkpoint.files import unsupported_features
from samestep.checkpoint.lock import FolderLock
from samestep.checkpoint.store import CheckpointFolder
from samestep.config import DEFAULT_KEEP, DEFAULT_PREFETCH, Recipe, RunOptions
from samestep.data.batch import map_tensors, move
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import set_tf32
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.logging import logger
from samestep.distributed.world import World
from samestep.errors import DataError, InputError
from samestep.launcher.job import process_state
from samestep.loggers.logger import EVENTS, JsonlLogger, RunLogger
from samestep.loggers.rank_monitor import RankMonitor
from samestep.loggers.trackers import create_loggers
from samestep.metrics.class_report import averages, class_rows
from samestep.metrics.metrics import MAX_CLASSES, BestRule, ConfusionMatrix, LossMetric, Metric
from samestep.metrics.overlays import is_segmentation, write_overlays
from samestep.recipes.builder import TASKS, Built, build, build_model, find, start_world
from samestep.recipes.forward import autocast, call_model
from samestep.recipes.gpu_notes import gpu_hints
from samestep.recipes.non_finite import skipped_most
from samestep.recipes.recipe_files import (
    DatasetInfo,
    recipe_data,
    update_recipe,
    write_dataset_info,
)
from samestep.recipes.training import Trainer, complete_epoch
from samestep.recipes.weights import load_all
from samestep.runs.folder import append_start, environment, recorded_keep, require_same_code
from samestep.session import start
from samestep.zoo.options import call, takes
from samestep.zoo.splits import Answer, Task


def without_pretrained(recipe: Recipe) -> Recipe:
    """Return the recipe without its file of initial weights, for a model with the weights of a checkpoint."""
    return replace(recipe, model=replace(recipe.model, pretrained=None))


def trained_model(recipe: Recipe, info: DatasetInfo, checkpoint: Path) -> torch.nn.Module:
    """Return the model of a checkpoint in evaluation mode, with averaged weights if the recipe has `ema`."""
    model, _ = build_model(without_pretrained(recipe), info.classes, info.model_options)
    checkpoints.load_model(checkpoint, model, averaged=recipe.ema is not None)
    return model.eval()


def build_task(recipe: Recipe, info: DatasetInfo) -> Task:
    """Return the prediction task of a recipe; raise `InputError` if its dataset has none."""
    name = recipe.data.name
    if name not in TASKS:
        raise InputError(
            f"data {name!r} has no prediction task",
            expected=f"data of a shipped recipe: {', '.join(TASKS)}",
            fix="use samestep export, and load the weights into your own model",
            code="E_UNKNOWN_NAME",
        )
    function = find(name, TASKS, "task")
    # The option `classes` of some data is in the class names of the run.
    takes_all = any(one.kind is one.VAR_KEYWORD for one in signature(function).parameters.values())
    names = [
        name
        for name in recipe.data.options
        if name != "classes" and (takes_all or takes(function, name))
    ]
    options = {name: recipe.data.options[name] for name in names}
    task = call(function, options, info.classes, where="data.options")
    assert isinstance(task, Task)
    return task


def predict(
    recipe: Recipe,
    options: RunOptions,
    info: DatasetInfo,
    checkpoint: Path,
    files: tuple[Path, ...],
    out: Path | None,
) -> list[Answer]:
    """Return the prediction for each file, in order, and write pictures of the task to the folder `out`."""
    task = build_task(recipe, info)
    if out is not None and task.picture is None:
        raise InputError(
            f"--out {out}, but data {recipe.data.name!r} has no pictures",
            expected="--out for segmentation only",
            fix="remove --out",
            code="E_OPTION_CONFLICT",
        )
    pictures = [None] * len(files) if out is None else _picture_paths(files, out)
    answers = []
    with _model_for_inference(recipe, options, info, checkpoint) as (model, device):
        for file, picture in zip(files, pictures, strict=True):
            inputs = map_tensors(task.read(file), lambda tensor: tensor.unsqueeze(0))
            outputs = call_model(model, move(inputs, device))
            outputs = map_tensors(outputs, lambda tensor: device_reads.copy(tensor[0].float()))
            answers.append({"file": str(file), **task.describe(outputs)})
            if picture is not None and task.picture is not None:
                picture.parent.mkdir(parents=True, exist_ok=True)
                task.picture(file, outputs).save(picture)
                answers[-1]["picture"] = str(picture)
    return answers


def _picture_paths(files: Sequence[Path], out: Path) -> list[Path]:
    """Return the picture of each file; none replaces another picture or an input."""
    paths = [out / f"{file.stem}.png" for file in files]
    counts = Counter(paths)
    inputs = {file.resolve() for file in files}
    for file, path in zip(files, paths, strict=True):
        is_input = path.resolve() in inputs
        if is_input or counts[path] > 1:
            raise InputError(
                f"--out {out}: the picture of {file} is {path}, which is also "
                + ("an input" if is_input else "that of another file"),
                expected="files of different names, and another folder for pictures than for inputs",
                fix="rename the files, or give another folder to --out",
                code="E_OUTPUT",
            )
    return paths


def complete(
    recipe: Recipe,
    options: RunOptions,
    info: DatasetInfo,
    checkpoint: Path,
    prompt: str,
    tokens: int,
) -> Answer:
    """Return a continuation of `prompt` with at most `tokens` tokens, if the model is a language model."""
    task = build_task(recipe, info)
    if task.complete is None:
        raise InputError(
            f"--prompt, but the input of the model is {task.reads}",
            expected="--prompt for language models only",
            fix="give files instead of --prompt",
            code="E_OPTION_CONFLICT",
        )
    with _model_for_inference(recipe, options, info, checkpoint) as (model, _):
        return {"prompt": prompt, "text": task.complete(model, prompt, tokens)}


@contextmanager
def _model_for_inference(
    recipe: Recipe, options: RunOptions, info: DatasetInfo, checkpoint: Path
) -> Iterator[tuple[torch.nn.Module, torch.device]]:
    with start(
        device=options.device, reduction=recipe.step.reduction, threads=recipe.step.threads
    ) as world:
        set_tf32(world.device, allowed=recipe.step.tf32)
        model = trained_model(recipe, info, checkpoint).to(world.device)
        with torch.no_grad(), autocast(recipe.step.precision, world.device):
            yield model, world.device


def train(
    recipe: Recipe,
    options: RunOptions,
    run: Path,
    checkpoint: Path | None,
    first_step: int,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Train a recipe in the directory `run`, from a `checkpoint` of step `first_step` or from the beginning (None, 0).

    With `accept_changes`, code and training data may differ from those of the last start and of the
    checkpoint.

    Returns:
        The fields of `Summary`; `stop_signal`, a number or None; and `has_failed`, whether most
        steps were skipped.
    """
    with (
        start_world(recipe, options) as world,
        FolderLock(run) if world.is_main else nullcontext(),
        RankMonitor(run, world, first_step) as rank_monitor,
    ):
        changes = (
            require_same_code(run, checkpoint, accept_changes=accept_changes)
            if world.is_main
            else []
        )
        notes = [f"continuing with changed code: {change}" for change in changes]
        has_events = checkpoint is None and world.is_main and "jsonl" in options.loggers
        with RunLogger([JsonlLogger(run / EVENTS)] if has_events else ()):
            built = build(
                recipe if checkpoint is None else without_pretrained(recipe), options, world
            )
        process_state.source_files.check_ranks(world)
        folder = _checkpoint_folder(run, options, world)
        trainer = Trainer(
            built.driver,
            built.train,
            built.evaluation,
            list(built.metrics),
            best=BestRule.of(recipe.best_by, recipe.best_mode, recipe.metrics),
            folder=folder,
            recipe=recipe_data(replace(recipe, loss=built.loss)),
            facts=built.facts,
            epochs=recipe.epochs,
            options=options,
            take_cache_reports=built.cache.take_reports if built.cache is not None else None,
            loggers=create_loggers(
                options.loggers, run, first_step=first_step, quiet=options.quiet
            ),
        )
        if world.is_main:
            notes += [
                f"{run} is on a file system without {name}" for name in unsupported_features(run)
            ]
            folder.clean()
        if checkpoint is not None:
            trainer.resume(checkpoint, accept_changes=accept_changes)
        if world.is_main:
            append_start(
                run,
                _environment(built, world, recipe, replace(options, keep=folder.keep), first_step),
            )
            write_dataset_info(built.dataset_info, run)
            if checkpoint is not None:
                update_recipe(run / "recipe.yaml", recipe)
            for note in notes + _notes(built, world, recipe, options, is_new=checkpoint is None):
                trainer.logger.log_event("note", text=note)
            if built.cache_note:
                trainer.logger.log_event("cache", text=built.cache_note)
        rank_monitor.follow(lambda: trainer.rank_progress)
        summary = trainer.fit()
        has_failed = skipped_most(summary.skipped_steps, summary.step)
        return {
            **asdict(summary),
            "stop_signal": world.context.stop.number,
            "has_failed": has_failed,
        }


def _checkpoint_folder(run: Path, options: RunOptions, world: World) -> CheckpointFolder:
    """Return the folder with `options.keep`; None is the number of the last start. Only rank 0 writes."""
    keep = options.keep or (recorded_keep(run) if world.is_main else DEFAULT_KEEP)
    folder = CheckpointFolder(run / "checkpoints", keep)
    if world.is_main:
        folder.hold(HeldFolder(run))
    return folder


def evaluate(
    recipe: Recipe,
    options: RunOptions,
    checkpoint: Path,
    report: Path | None = None,
    classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint or a weights file, and return `loss`, `samples` and the metrics of the recipe.

    With the `classes` of the run, data with other classes raise `DataError`.

    With the directory of a `report`, the result also has the confusion matrix as `by_class`, and
    the first samples of a segmentation task are drawn into `overlays` in this directory.
    """
    with start_world(recipe, options) as world:
        built = build(replace(without_pretrained(recipe), ema=None), options, world)
        _require_classes(built.dataset_info.classes, classes)
        model = built.driver.model
        is_averaged = recipe.ema is not None
        if checkpoint.is_dir():
            checkpoints.load_model(
                checkpoint, model, built.driver.local_parameters, averaged=is_averaged
            )
        else:
            load_all(model, checkpoint)
        if report is not None:
            values = evaluate_by_class(built, recipe, report / "overlays")
        else:
            values = evaluated(built, built.metrics)
        for text in built.cache.take_reports() if built.cache is not None else ():
            logger.warning(text)
        return values


def _require_classes(classes: Sequence[str], expected: Sequence[str] | None) -> None:
    if expected is not None and list(classes) != list(expected):
        raise DataError(
            f"the data have the classes {', '.join(classes)}, the run has {', '.join(expected)}",
            expected="the classes of the run, in the same order",
            fix="set data.options.evaluation_path alone, so that the classes are those of the training data",
            code="E_CLASSES",
        )


def _notes(
    built: Built, world: World, recipe: Recipe, options: RunOptions, *, is_new: bool
) -> list[str]:
    """Return notes on weights, layout and loader processes for the log."""
    shape = world.mesh_shape
    strategy = recipe.strategy
    notes = (
        [*built.notes, *gpu_hints(built.driver.model, recipe.step, world.device)] if is_new else []
    )
    warmup = recipe.schedule.warmup_epochs
    if is_new and warmup > recipe.epochs:
        notes.append(
            f"warning: schedule.warmup_epochs is {warmup:g} and epochs is {recipe.epochs}: the learning rate does not "
            "reach its full value"
        )
    if shape.splits_model:
        notes.append(shape.describe())
    if shape.replicate > 1 and strategy.gradient_note is not None:
        notes.append(strategy.gradient_note)
    return notes


def _environment(
    built: Built, world: World, recipe: Recipe, options: RunOptions, first_step: int
) -> dict[str, Any]:
    return environment(
        world,
        from_step=first_step,
        strategy=world.mesh_shape.name,
        remark=recipe.strategy.gradient_note if world.mesh_shape.replicate > 1 else None,
        threads=recipe.step.threads,
        workers=built.workers,
        prefetch=DEFAULT_PREFETCH,
        keep=options.keep,
    )


_MAX_OVERLAYS = 16


class _ClassCounts(ConfusionMatrix):
    """Confusion matrix `matrix[class][prediction]`; as a single number, the mean recall of the classes."""

    matrix: list[list[int]]

    def value(self, counts: torch.Tensor) -> float:
        self.matrix = (counts.view(2, 2) if counts.dim() == 1 else counts).tolist()
        return averages(class_rows(self.matrix, [""] * len(self.matrix)))[self.name]


def evaluate_by_class(built: Built, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the evaluation with the confusion matrix as `by_class`, and draw samples of a segmentation into `folder`.

    Raises:
        InputError: the data has no classes, or too many.
    """
    classes = built.dataset_info.classes
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise InputError(
            f"the data of this recipe has {len(classes)} classes",
            expected=f"1 to {MAX_CLASSES:,} classes for a report by class",
            fix="omit --report",
        )
    counts = _ClassCounts(
        "balanced_accuracy", len(classes), recipe.loss.options.get("ignore_index", -100)
    )
    values = evaluated(built, [*built.metrics, counts])
    names = (
        list(classes) if len(classes) > 1 else ["background", *classes]
    )  # one class: binary segmentation
    by_class = {
        "classes": names,
        "counts": counts.matrix,
        "pictures": _draw_overlays(built, recipe, folder),
    }
    return values | {"by_class": by_class}


def evaluated(built: Built, metrics: Sequence[Metric | LossMetric]) -> dict[str, float]:
    """Return the values of an evaluation; a collective."""
    batches = (
        batch for batch in complete_epoch(built.evaluation.batches) if batch.data is not None
    )
    values = built.driver.evaluate(batches, metrics)
    assert values is not None
    return values


def _draw_overlays(built: Built, recipe: Recipe, folder: Path) -> int:
    """Draw the predictions of the first evaluation samples on rank 0, and return their number; a collective.

    File names are the positions in the evaluation data. Only segmentation tasks have overlays.
    """
    driver = built.driver
    count = 0
    for path in (
        folder.glob("sample-*.png") if driver.world.is_main else ()
    ):  # of an earlier evaluation
        path.unlink()
    with driver.evaluating(), closing(complete_epoch(built.evaluation.batches)) as batches:
        for number, batch in enumerate(batches):
            if number * recipe.batch_size >= _MAX_OVERLAYS:
                break
            if batch.data is None:
                continue
            inputs, targets = driver.on_device(batch)
            outputs = driver.losses(inputs, targets)[0]
            positions = [place for place in batch.samples.tolist() if place < _MAX_OVERLAYS]
            if positions and is_segmentation(inputs, targets, outputs):
                drawn = [
                    tensor[: len(positions)] for tensor in (inputs, targets, outputs)
                ]  # on all ranks: it gathers
                if driver.world.is_main:
                    write_overlays(folder, positions, *drawn)
                count += len(positions)
    return count
