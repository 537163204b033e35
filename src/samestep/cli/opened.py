"""A run that is there: its recipe and where it can go on."""

from __future__ import annotations

from pathlib import Path

from samestep.checkpoint.manifest import read_origin
from samestep.checkpoint.store import CheckpointFolder
from samestep.cli.member import Plan
from samestep.config import Recipe
from samestep.errors import CheckpointError, InputError
from samestep.recipes.parse import differences, make_recipe, read_recipe, recipe_data


def plan_to_go_on(folder: Path, overrides: list[str]) -> Plan:
    """Go on with a run from its newest whole checkpoint; from the beginning where it has none.

    Raises:
        InputError: there is no such run.
        CheckpointError: the recipe is not the one that led to the checkpoint.
    """
    newest = CheckpointFolder(folder / "checkpoints").newest_whole()
    if newest is None:
        return Plan(_recipe(folder, overrides), folder)
    recipe, checkpoint, step = open_run(folder, str(read_origin(newest)[0]), overrides)
    return Plan(recipe, folder, checkpoint, step)


def open_run(folder: Path, which: str, overrides: list[str]) -> tuple[Recipe, Path, int]:
    """The recipe of a run, one of its checkpoints, verified, and the step of that.

    Raises:
        InputError: there is no such run.
        CheckpointError: the checkpoint is damaged, or the recipe is not the one that led to it.
    """
    recipe = _recipe(folder, overrides)
    checkpoint = CheckpointFolder(folder / "checkpoints").find(which)
    step, origin = read_origin(checkpoint)
    before, now = recipe_data(make_recipe(origin, (), origin=str(checkpoint))), recipe_data(recipe)
    # How the model lives on devices may change from one part of a run to the next.
    changed = differences({**before, "strategy": None}, {**now, "strategy": None})
    if changed:
        raise CheckpointError(
            "the recipe differs from the one that led to this checkpoint:\n    " + "\n    ".join(changed),
            rule="a run keeps its recipe from the first step to the last",
            do=f"undo that, or start a new run from these weights: samestep train ... "
            f"--set model.pretrained={checkpoint}/model.safetensors",
        )
    return recipe, checkpoint, step


def _recipe(folder: Path, overrides: list[str]) -> Recipe:
    if not (folder / "recipe.yaml").is_file():
        raise InputError(f"{folder} is not a run", rule="a run directory has a recipe.yaml", do="look at the path")
    return read_recipe(folder / "recipe.yaml", overrides)
