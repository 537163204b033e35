"""Evaluation by class, and pictures of the predictions of the first evaluation samples."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from samestep.config import Recipe
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.world import all_gather
from samestep.engine.microbatch_forward import autocast, call_model
from samestep.errors import InputError
from samestep.metrics.class_report import averages, class_rows
from samestep.metrics.counts import MAX_CLASSES, ConfusionMatrix
from samestep.metrics.overlays import is_segmentation, write_overlays
from samestep.recipes.builder import Built

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
    counts = _ClassCounts("balanced_accuracy", len(classes), recipe.loss.options.get("ignore_index", -100))
    values = built.engine.evaluate(built.evaluation, [*built.metrics, counts])
    names = list(classes) if len(classes) > 1 else ["background", *classes]  # one class: binary segmentation
    by_class = {"classes": names, "counts": counts.matrix, "pictures": _draw_overlays(built, recipe, folder)}
    return values | {"by_class": by_class}


def _draw_overlays(built: Built, recipe: Recipe, folder: Path) -> int:
    """Draw the predictions of the first evaluation samples, and return their number over all ranks.

    File names are the positions in the evaluation data, so the files do not depend on the number of ranks. Only
    segmentation tasks have overlays. A collective operation.
    """
    world, model, data = built.engine.world, built.engine.model, built.evaluation
    count = 0
    for path in folder.glob("sample-*.png") if world.is_main else ():  # of an earlier evaluation
        path.unlink()
    world.barrier()
    model.eval()
    with torch.no_grad(), autocast(recipe.step.precision, world.device):
        for batch in takewhile(lambda batch: batch.begin.samples < _MAX_OVERLAYS, data.complete_epoch()):
            for microbatch in (*batch.local_microbatches, *batch.fillers):
                inputs, targets = microbatch.data
                outputs = call_model(model, inputs)
                positions = [place for place in _positions(batch, microbatch) if place < _MAX_OVERLAYS]
                if positions and is_segmentation(inputs, targets, outputs):
                    drawn = (tensor[: len(positions)] for tensor in (inputs, targets, outputs))
                    write_overlays(folder, positions, *drawn)
                    count += len(positions)
    return sum(all_gather(count, world))


def _positions(batch: GlobalBatch, microbatch: Microbatch) -> list[int]:
    """Return the dataset positions of the samples in the data of a microbatch, without those that were left out."""
    positions = batch.samples_of(microbatch.number) if microbatch.size else []
    return [place for place in positions if place not in microbatch.left_out]
