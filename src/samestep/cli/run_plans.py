"""Recipes and plans of commands: a new, resumed or evaluated run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.config import Recipe
from samestep.distributed.logging import logger
from samestep.errors import InputError, RecipeError
from samestep.number_text import plural
from samestep.recipes.recipe_files import (
    load_recipe,
    make_recipe,
    read_recipe,
    recipe_data,
    require_recipe_of_checkpoint,
)
from samestep.recipes.trust import require_trusted
from samestep.runs import LOOP, not_a_run
from samestep.tools.run_log import run_errors


def load_resolved(name: str, overrides: Sequence[str], report: Callable[[str], None]) -> Recipe:
    """Return a recipe with a number of microbatches, and report the choice of `auto`."""
    recipe = load_recipe(name, overrides)
    if recipe.microbatches == "auto":
        recipe = recipe.with_microbatches()
        count = recipe.microbatch_count
        processes = plural(count * recipe.strategy.ranks_per_model, "process")
        report(f"microbatches: {count} (auto); at most {processes}")
    return recipe


@dataclass(frozen=True)
class RunPlan:
    """Work of all ranks, as decided by rank 0."""

    recipe: Recipe  # recipe of the run
    folder: Path  # directory of the run
    checkpoint: Path | None = None  # checkpoint to start from, if any
    step: int = 0  # optimizer steps of the checkpoint
    accept_changes: bool = False  # whether data and code may differ from those of the checkpoint

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        paths = (str(self.folder), str(self.checkpoint or ""))
        return json.dumps([recipe_data(self.recipe), *paths, self.step, self.accept_changes])

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        """Return the plan from the text of `to_json`."""
        data, folder, checkpoint, step, accept_changes = json.loads(text)
        recipe = make_recipe(data, (), origin="rank 0's recipe")
        path = Path(checkpoint) if checkpoint else None
        return cls(recipe, Path(folder), path, step, accept_changes)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint folder, also of `.replaced-step-N`."""
    return int(checkpoint.name.rpartition("step-")[2])


def plan_to_resume(folder: Path, overrides: list[str], *, trust: bool | Recipe) -> RunPlan:
    """Return the plan that resumes a run from the newest complete checkpoint.

    Without one, the run starts from the beginning.
    """
    newest = CheckpointFolder(folder / "checkpoints").newest_valid()
    if newest is not None:
        return plan_from_checkpoint(folder, str(step_of(newest)), overrides, trust=trust)
    _require_run(folder)
    return RunPlan(_read_recipe(folder, overrides, trust=trust), folder)


def plan_from_checkpoint(
    folder: Path, which: str, overrides: list[str], *, trust: bool | Recipe
) -> RunPlan:
    """Return the plan that starts from a verified checkpoint of a run: `best`, `last` or a step.

    Raises:
        InputError: there is no such run, or its recipe names code that is not trusted.
        CheckpointError: the checkpoint is damaged or belongs to another recipe.
    """
    _require_run(folder)
    checkpoint = CheckpointFolder(folder / "checkpoints").find(which)
    progress = read_state(checkpoint).progress
    origin = make_recipe(progress.recipe, (), origin=str(checkpoint))
    recipe = _read_recipe(folder, overrides, trust=trust, origin=origin)
    require_recipe_of_checkpoint(recipe, origin, checkpoint)
    return RunPlan(recipe, folder, checkpoint, progress.step)


def _require_run(folder: Path) -> None:
    """Require the run of a recipe: none describes the model and the data of a script."""
    with run_errors(folder):
        is_script = (folder / LOOP).is_file()
    if is_script:
        expected = "the run of a recipe: a script builds model and data itself"
        fix = "start the script again, which continues its run"
        raise InputError(f"{folder} is the run of a script", expected, fix, code="E_SCRIPT")
    has_steps = bool(CheckpointFolder(folder / "checkpoints").steps())
    if not has_steps and not (folder / "recipe.yaml").is_file():
        raise not_a_run(folder)


def _read_recipe(
    folder: Path, overrides: list[str], *, trust: bool | Recipe, origin: Recipe | None = None
) -> Recipe:
    """Return the recipe of a run with overrides.

    `origin`, the recipe of a checkpoint, is used in place of a damaged file.
    """
    try:
        recipe = read_recipe(folder / "recipe.yaml")
    except RecipeError as error:
        if origin is None:
            raise
        logger.warning("%s; the recipe of the checkpoint is used", error.value)
        recipe = origin
    require_trusted(folder, recipe, trust=trust)  # overrides are the user's own
    return make_recipe(recipe_data(recipe), overrides, origin=str(folder / "recipe.yaml"))
