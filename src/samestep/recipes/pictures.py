"""Pictures of the first samples of an evaluation, where a model says something of each pixel."""

from __future__ import annotations

from pathlib import Path

import torch

from samestep.config import Recipe
from samestep.cursor import Cursor
from samestep.engine.forward import autocast, call_model
from samestep.errors import RunError
from samestep.recipes.build import Built
from samestep.record.overlays import is_overlaid, write_overlays
from samestep.runtime.gather import all_gather

_MOST = 16


def draw_first(built: Built, recipe: Recipe, folder: Path) -> int:
    """Draw the first samples of the evaluation data into `folder`; how many, over all ranks, which all call it.

    Each is named by its place in the evaluation, so any number of ranks writes the same files. Other tasks have none.

    Raises:
        RunError: the folder cannot be written to.
    """
    world, model, data = built.engine.world, built.engine.model, built.evaluation
    data.cursor = Cursor()
    batch = next(iter(data))
    drawn = 0
    model.eval()
    with torch.no_grad(), autocast(recipe.step.precision, world.device):
        for part in batch.parts:
            first = batch.bounds[part.number][0]
            places = range(first, min(first + part.size, _MOST))
            inputs, targets = part.data
            outputs = call_model(model, inputs)
            if places and is_overlaid(inputs, targets, outputs):
                count = len(places)
                _write(folder, places, inputs[:count], targets[:count], outputs[:count])
                drawn += count
    data.cursor = Cursor()
    return sum(all_gather(drawn, world))


def _write(folder: Path, places: range, *samples: torch.Tensor) -> None:
    try:
        write_overlays(folder, places, *samples)
    except OSError as error:
        raise RunError(
            f"pictures cannot be written to {folder}: {error.strerror}",
            do="make room on the disk, or name another folder",
        ) from error
