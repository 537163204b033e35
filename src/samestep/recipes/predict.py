"""Predictions of a trained recipe, and its evaluation by class with pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from samestep.checkpoint.state import load_model
from samestep.config import Recipe, RunOptions
from samestep.data.batch import map_tensors, move
from samestep.distributed.device_reads import device_reads
from samestep.distributed.kernels import set_tf32
from samestep.errors import InputError
from samestep.metrics.metrics import MAX_CLASSES, ConfusionMatrix, CountMetric, LossMetric
from samestep.recipes.bad_samples import complete_epoch
from samestep.recipes.builder import TASKS, Built, build_model, find, without_pretrained
from samestep.recipes.class_report import averages, class_rows
from samestep.recipes.recipe_files import DatasetInfo
from samestep.recipes.training_step import autocast, call_model
from samestep.session import start
from samestep.zoo.options import call, takes
from samestep.zoo.overlays import overlay, owner_of_classes, scaled_image, write_pictures
from samestep.zoo.splits import Answer, Task

_MAX_OVERLAYS = 16  # and texts
_MAX_TEXT = 300  # characters of a text in a report


def trained_model(recipe: Recipe, info: DatasetInfo, checkpoint: Path) -> torch.nn.Module:
    """Return the model of a checkpoint in evaluation mode, with the averaged weights of `ema`."""
    model, _ = build_model(without_pretrained(recipe), info.classes, info.model_options)
    load_model(checkpoint, model, averaged=recipe.ema is not None)
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
    options = {
        name: value
        for name, value in recipe.data.options.items()
        if name != "classes" and (takes_all or takes(function, name))
    }
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
    """Return the prediction for each file, and write pictures of the task to the folder `out`."""
    task = build_task(recipe, info)
    if out is not None and task.picture is None:
        raise InputError(
            f"--out {out}, but data {recipe.data.name!r} has no pictures",
            expected="--out for segmentation only",
            fix="remove --out",
            code="E_OPTION_CONFLICT",
        )
    pictures: Sequence[Path | None] = [None] * len(files)
    if out is not None:
        pictures = picture_paths(files, out)
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


def picture_paths(files: Sequence[Path], out: Path) -> list[Path]:
    """Return the picture of each file; none replaces another picture or an input."""
    paths = [out / f"{file.stem}.png" for file in files]
    counts = Counter(paths)
    inputs = {file.resolve() for file in files}
    for file, path in zip(files, paths, strict=True):
        other = None
        if counts[path] > 1:
            other = "that of another file"
        if path.resolve() in inputs:
            other = "an input"
        if other is not None:
            raise InputError(
                f"--out {out}: the picture of {file} is {path}, which is also {other}",
                expected="files of different names, and a folder for pictures without inputs",
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
    """Return a continuation of `prompt` by a language model, with at most `tokens` tokens."""
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
    config = recipe.step
    session = start(device=options.device, reduction=config.reduction, threads=config.threads)
    with session as world:
        set_tf32(world.device, allowed=config.tf32)
        model = trained_model(recipe, info, checkpoint).to(world.device)
        with torch.no_grad(), autocast(config.precision, world.device):
            yield model, world.device


def evaluated(built: Built, metrics: Sequence[CountMetric | LossMetric]) -> dict[str, float]:
    """Return the values of an evaluation; a collective."""
    values = built.driver.evaluate(complete_epoch(built.evaluation), metrics)
    assert values is not None
    return values


class _ClassCounts(ConfusionMatrix):
    """Confusion matrix `matrix[class][prediction]`; as one number, the mean recall of classes."""

    matrix: list[list[int]]

    def value(self, counts: torch.Tensor) -> float:
        if counts.dim() == 1:
            counts = counts.view(2, 2)
        # Kept for the report: an evaluation returns one number for each metric.
        self.matrix = counts.tolist()
        return averages(class_rows(self.matrix, [""] * len(self.matrix)))[self.name]


def evaluate_by_class(built: Built, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the evaluation with the confusion matrix as `by_class`; draw samples into `folder`.

    Raises:
        InputError: the data has no classes, or too many.
    """
    classes = list(built.splits.classes)
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise InputError(
            f"the data of this recipe has {len(classes)} classes",
            expected=f"1 to {MAX_CLASSES:,} classes for a report by class",
            fix="omit --report",
        )
    counts = _ClassCounts("balanced_accuracy", len(classes), built.driver.ignore_index)
    values = evaluated(built, [*built.metrics, counts])
    if len(classes) == 1:  # binary segmentation
        classes = ["background", *classes]
    samples = _draw_samples(built, recipe, folder, classes)
    by_class = {"classes": classes, "counts": counts.matrix, "samples": samples}
    return values | {"by_class": by_class}


def _draw_samples(
    built: Built, recipe: Recipe, folder: Path, classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return positions and predictions of the first samples, with their texts; a collective.

    Images are drawn. File names are the positions in the evaluation data. Rank 0 writes.
    """
    driver = built.driver
    is_main = driver.world.is_main
    if is_main:
        for path in folder.glob("sample-*.png"):  # of an earlier evaluation
            path.unlink()
    samples: list[dict[str, Any]] = []
    names = dict(enumerate(classes))
    text_of = built.splits.evaluation_text
    with driver.evaluating(), closing(complete_epoch(built.evaluation)) as batches:
        for number, batch in enumerate(batches):
            if number * recipe.batch_size >= _MAX_OVERLAYS:
                break
            if batch.data is None:
                continue
            inputs, targets = driver.on_device(batch)
            outputs = driver.losses(inputs, targets)[0]
            positions = batch.samples.tolist()[: _MAX_OVERLAYS - number * recipe.batch_size]
            owner = owner_of_classes(inputs, targets, outputs)
            if owner is None and text_of is None:
                continue
            # On all ranks, because it gathers.
            true, scores = (tensor[: len(positions)] for tensor in (targets, outputs))
            if owner is not None:
                inputs = inputs[: len(positions)]
            if owner == "pixel" and is_main:
                write_pictures(folder, positions, map(overlay, inputs, true, scores))
            elif owner == "image" and is_main:
                write_pictures(folder, positions, map(scaled_image, inputs))
            pairs: list[Sequence[int]] = [()] * len(positions)
            if owner != "pixel":
                numbers = torch.stack([true, scores.argmax(dim=1)], dim=1)
                pairs = device_reads.copy(numbers).tolist()
            for position, pair in zip(positions, pairs, strict=True):
                # Ignored targets are no class.
                texts = [names.get(number, "none") for number in pair]
                entry = dict(zip(("class", "prediction"), texts, strict=False))
                if text_of is not None:
                    entry["text"] = text_of(position)[:_MAX_TEXT]
                samples.append({"sample": position, **entry})
    return samples
