"""A model as a run has trained it, without the data that it was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

import samestep.checkpoint.state as checkpoints
from samestep.config import Recipe
from samestep.errors import InputError
from samestep.recipes.build import build_model
from samestep.recipes.facts import DataFacts
from samestep.recipes.names import TASKS, call, find, takes
from samestep.recipes.task import Task


def without_pretrained(recipe: Recipe) -> Recipe:
    """The recipe of a model that takes its weights from a checkpoint: those that it began with are not needed again."""
    return replace(recipe, model=replace(recipe.model, pretrained=None))


def trained_model(recipe: Recipe, facts: DataFacts, checkpoint: Path) -> torch.nn.Module:
    """The model of a checkpoint, ready to be asked: averaged weights if the recipe averages them.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    model, _ = build_model(without_pretrained(recipe), facts.classes, facts.model_options)
    checkpoints.load_model(checkpoint, model, averaged=recipe.ema is not None)
    return model.eval()


def task_of(recipe: Recipe, facts: DataFacts) -> Task:
    """What the model of a run is for.

    Raises:
        InputError: nobody has said.
    """
    name = recipe.data.name
    if name not in TASKS:
        raise InputError(
            f"what a model of data {name!r} is for is not known",
            rule=f"data of a recipe that comes with Samestep: {', '.join(TASKS)}",
            do="samestep export gives the weights; load them into your own model",
        )
    function = find(name, TASKS, "task")
    options = {key: value for key, value in recipe.data.options.items() if takes(function, key)}
    made = call(function, options, facts.classes, where="data.options")
    assert isinstance(made, Task)
    return made
