"""`samestep resume`: go on with a run, on any number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from samestep.checkpoint.manifest import read_origin
from samestep.checkpoint.store import CheckpointFolder
from samestep.cli import options
from samestep.cli.train import run_ranks
from samestep.config import Recipe
from samestep.errors import CheckpointError, InputError
from samestep.recipes.parse import differences, make_recipe, read_recipe, recipe_data


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "resume",
        help="go on with a run",
        description="Go on with a run from a checkpoint, on any number of processes, with the same result.",
        epilog="example: samestep resume runs/first --processes 3",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("--checkpoint", default="last", metavar="WHICH", help="last, best, or a step (default last)")
    options.add_set_option(parser)
    options.add_machine_options(parser)
    options.add_saving_options(parser)
    options.add_check_option(parser)
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Resume; exit codes as those of train."""
    recipe, checkpoint, step = open_run(arguments.folder, arguments.checkpoint, arguments.overrides)
    return run_ranks(arguments, recipe, options.run_options(arguments), arguments.folder, checkpoint, step)


def open_run(folder: Path, which: str, overrides: list[str]) -> tuple[Recipe, Path, int]:
    """The recipe of a run, one of its checkpoints, verified, and the step of that.

    Raises:
        InputError: there is no such run.
        CheckpointError: the checkpoint is damaged, or the recipe is not the one that led to it.
    """
    if not (folder / "recipe.yaml").is_file():
        raise InputError(f"{folder} is not a run", rule="a run directory has a recipe.yaml", do="look at the path")
    checkpoint = CheckpointFolder(folder / "checkpoints").find(which)
    step, origin = read_origin(checkpoint)
    recipe = read_recipe(folder / "recipe.yaml", overrides)
    before = recipe_data(make_recipe(origin, (), origin=str(checkpoint)))
    changed = differences(before, recipe_data(recipe))
    if changed:
        raise CheckpointError(
            "the recipe differs from the one that led to this checkpoint:\n    " + "\n    ".join(changed),
            rule="a run keeps its recipe from the first step to the last",
            do=f"undo that, or start a new run from these weights: samestep train ... "
            f"--set model.pretrained={checkpoint}/model.safetensors",
        )
    return recipe, checkpoint, step
