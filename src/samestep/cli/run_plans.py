"""Plans of runs: of a new run, of a resumption or an evaluation from a checkpoint, and of a replayed step."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.config import Recipe
from samestep.distributed.logging import logger
from samestep.errors import CheckpointError, InputError, RecipeError
from samestep.recipes.recipe_files import (
    differences,
    make_recipe,
    read_recipe,
    recipe_data,
    with_saved_weight,
)
from samestep.recipes.trust import require_trusted
from samestep.runs import LOOP
from samestep.tools.run_log import run_errors


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
        checkpoint = str(self.checkpoint or "")
        return json.dumps(
            [recipe_data(self.recipe), str(self.folder), checkpoint, self.step, self.accept_changes]
        )

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        """Return the plan from the text of `to_json`."""
        recipe, folder, checkpoint, step, accept_changes = json.loads(text)
        path = Path(checkpoint) if checkpoint else None
        return cls(
            make_recipe(recipe, (), origin="rank 0's recipe"),
            Path(folder),
            path,
            step,
            accept_changes,
        )


def plan_to_resume(folder: Path, overrides: list[str], *, trust: bool | Recipe) -> RunPlan:
    """Return the plan that resumes a run from the newest complete checkpoint, or from the beginning without one."""
    newest = CheckpointFolder(folder / "checkpoints").newest_valid()
    if newest is None:
        _require_run(folder)
        return RunPlan(_read_recipe(folder, overrides, trust=trust), folder)
    return plan_from_checkpoint(
        folder, str(read_state(newest).progress.step), overrides, trust=trust
    )


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
    recipe = with_saved_weight(_read_recipe(folder, overrides, trust=trust, origin=origin), origin)
    # A run can be resumed with another strategy, and with more epochs.
    free = {"strategy": None, "epochs": None}
    _require_equal(
        {**recipe_data(origin), **free},
        {**recipe_data(recipe), **free},
        "the recipe differs from the recipe of the checkpoint",
        "undo the change, or start a new run from these weights: samestep train ... "
        f"--set model.pretrained={checkpoint}/model.safetensors",
    )
    return RunPlan(recipe, folder, checkpoint, progress.step)


def require_same_recipe(plan: RunPlan, recipe: Recipe) -> None:
    """Require that a run that `samestep train --or-resume` continues has the recipe of the command."""
    if recipe.microbatches == "auto":
        recipe = replace(recipe, microbatches=plan.recipe.microbatches)
    _require_equal(
        recipe_data(plan.recipe),
        recipe_data(with_saved_weight(recipe, plan.recipe)),
        f"the recipe differs from the recipe of the run {plan.folder}",
        "another --name for a new run, or undo the change",
    )


def _require_equal(before: dict[str, Any], now: dict[str, Any], message: str, fix: str) -> None:
    changes = differences(before, now)
    if changes:
        problem = "\n    ".join([f"{message}:", *changes])
        raise CheckpointError(
            problem, "the same recipe for all steps of a run", fix, code="E_RESUME_CHANGED"
        )


def plan_to_replay(folder: Path, begin: int, *, trust: bool) -> RunPlan:
    """Return the plan that computes the steps of a run after `begin` again, from a checkpoint at or before it, if any.

    The number of epochs, on which a schedule can depend, is that of the first later checkpoint, if
    there is one.
    """
    steps = {
        int(path.name.rpartition("step-")[2]): path
        for path in CheckpointFolder(folder / "checkpoints").steps()
    }
    later = [number for number in steps if number > begin]
    overrides: list[str] = []
    if later:
        epochs = read_state(steps[min(later)]).progress.recipe.get("epochs")
        overrides = [f"epochs={epochs}"] if isinstance(epochs, int) else []
    before = [number for number in steps if number <= begin]
    if before:
        return plan_from_checkpoint(folder, str(max(before)), overrides, trust=trust)
    _require_run(folder)
    return RunPlan(_read_recipe(folder, overrides, trust=trust), folder)


def refuse_script_run(folder: Path) -> None:
    """Raise an `InputError` if a directory is the run of a script: no recipe describes its model and data."""
    with run_errors(folder):
        is_script = (folder / LOOP).is_file()
    if is_script:
        expected = "the run of a recipe: a script builds model and data itself"
        fix = "start the script again, which continues its run"
        raise InputError(f"{folder} is the run of a script", expected, fix, code="E_SCRIPT")


def _require_run(folder: Path) -> None:
    refuse_script_run(folder)
    if (
        not CheckpointFolder(folder / "checkpoints").steps()
        and not (folder / "recipe.yaml").is_file()
    ):
        expected = "a run directory with a recipe.yaml"
        raise InputError(f"{folder} is not a run", expected, "check the path", code="E_NOT_A_RUN")


def _read_recipe(
    folder: Path, overrides: list[str], *, trust: bool | Recipe, origin: Recipe | None = None
) -> Recipe:
    """Return the recipe of a run with overrides; `origin`, of a checkpoint, is used in place of a damaged file."""
    try:
        recipe = read_recipe(folder / "recipe.yaml")
    except RecipeError as error:
        if origin is None:
            raise
        logger.warning("%s; the recipe of the checkpoint is used", error.value)
        recipe = origin
    require_trusted(folder, recipe, trust=trust)  # overrides are the user's own
    return make_recipe(recipe_data(recipe), overrides, origin=str(folder / "recipe.yaml"))
