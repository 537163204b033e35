"""Recipe of a command: options of the strategy and the batch size, and plans that start from checkpoints of runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.cli.launch_options import PRELOAD, parse_process_count
from samestep.cli.options import progress
from samestep.config import MeshConfig, Recipe, StrategyConfig
from samestep.config.strategy import AXES, StrategyName
from samestep.distributed.logging import logger
from samestep.errors import CheckpointError, InputError, RecipeError
from samestep.launcher.launch import launch
from samestep.launcher.pickling import ByName
from samestep.recipes.recipe_files import (
    differences,
    load_recipe,
    make_recipe,
    make_saved_recipe,
    read_recipe,
    recipe_data,
)
from samestep.recipes.trust import require_trusted
from samestep.tools.tune.settings import TunedSetting
from samestep.units import plural

# Data whose modules import torchvision: once for the worker that builds the model, and for the ranks.
_DATA_OF_TORCHVISION = ("images", "image_list", "hub_images", "stream_images")


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add `--strategy`, `--mesh` and `--shares`."""
    group = parser.add_argument_group(
        "strategy (results are equal: under tp without step.tensor_slices to rounding, otherwise to the bit)"
    )
    text = "parallel strategy instead of the recipe's (docs/guides/strategies/index.md)"
    group.add_argument("--strategy", choices=get_args(StrategyName), help=text)
    text = f"sizes of the axes {', '.join(AXES)}; the product is the number of processes"
    group.add_argument("--mesh", metavar="AXIS=N,...", help=text)
    text = "share of the microbatches of each rank, for devices of different speeds, such as 5,3 for 8 microbatches; "
    text += "auto moves microbatches away from a rank that stays slow during training"
    group.add_argument("--shares", metavar="N,...|auto", help=text)


def all_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of `--strategy`, `--mesh` and `--shares`, followed by those of `--set`.

    Raises:
        InputError: the mesh or the shares are invalid.
    """
    strategy, mesh = arguments.strategy, arguments.mesh
    section: dict[str, Any] = {"mesh": _parse_mesh(mesh, f"--mesh {mesh}")} if mesh is not None else {}
    if arguments.shares is not None:
        section["shares"] = _parse_shares(arguments.shares)
    if strategy is not None:
        # Replaces the complete section: options of another strategy have no meaning for this one.
        return [f"strategy={json.dumps({'name': strategy, **section})}", *arguments.overrides]
    return [*(f"strategy.{key}={json.dumps(value)}" for key, value in section.items()), *arguments.overrides]


def parse_strategy(text: str) -> StrategyConfig:
    """Return the strategy of `NAME` or `NAME:AXIS=N,...`.

    Raises:
        InputError: there is no such strategy or axis.
    """
    name, colon, sizes = text.partition(":")
    mesh = MeshConfig(**_parse_mesh(sizes, f"--layout {text}")) if colon else MeshConfig()
    return StrategyConfig(name=name, mesh=mesh)  # type: ignore[arg-type]


def _parse_shares(text: str) -> list[int] | str:
    if text == "auto":
        return text
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        expected = "a positive number for each rank that shares the data, separated by commas, or auto"
        raise InputError(f"--shares {text}", expected, "--shares 5,3", code="E_SHARES")
    return [int(part) for part in parts]


def _parse_mesh(text: str, option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not (size.isascii() and size.isdigit()) or int(size) < 1 or axis in sizes:
            expected = f"AXIS=N, separated by commas, each axis once: {', '.join(AXES)}"
            raise InputError(option, expected, "--mesh replicate=2,tensor=2", code="E_MESH")
        sizes[axis] = int(size)
    return sizes


def with_batch_size(overrides: list[str], size: int | None, processes: str, accumulate: int | None = None) -> list[str]:
    """Return overrides of a recipe with those of `--per-device-batch-size` and `--accumulate`.

    Each process has `accumulate` microbatches, of `size` samples if `--per-device-batch-size` is set. Without
    `--accumulate`, it has one microbatch of `size` samples, unless the overrides set `microbatches`.

    Args:
        overrides: overrides of `--set`.
        size: value of `--per-device-batch-size`, if any.
        processes: value of `--processes`.
        accumulate: value of `--accumulate`, if any.

    Raises:
        InputError: `processes` is not a number, or the overrides set a key of these options too.
    """
    if size is None and accumulate is None:
        return overrides
    options = {"batch_size": f"--per-device-batch-size {size}"} if size is not None else {}
    options |= {"microbatches": f"--accumulate {accumulate}"} if accumulate is not None else {}
    if not processes.isdigit():
        key, option = next(iter(options.items()))
        value = 2 * (size or accumulate or 1)
        raise InputError(
            f"{option} with --processes {processes}",
            expected=f"a number of processes: {key} belongs to the recipe and must not depend on the machine",
            fix=f"--processes 2 for {key}={value}, or --set {key}={value} instead",
            code="E_BATCH_SIZE",
        )
    for override in overrides:
        key = override.partition("=")[0]
        if key in options:
            raise InputError(
                f"{options[key]} and --set {override}",
                expected=f"one option for {key}",
                fix="leave one of the two options out",
                code="E_BATCH_SIZE",
            )
    count = parse_process_count(processes)
    microbatches = count * (accumulate or 1)
    sizes = [] if size is None else [f"batch_size={size * microbatches}"]
    return [f"microbatches={microbatches}", *overrides, *sizes]


def with_microbatches(recipe: Recipe, *, is_rank: bool = False) -> tuple[Recipe, str | None]:
    """Return the recipe with a number in place of `microbatches: auto`, and a line of text about the number.

    The number is a function of the recipe alone. The model is built only if the number depends on batch norm: in a
    worker process, or here if this process `is_rank`.
    """
    if recipe.microbatches != "auto":
        return recipe, None
    resolved, reason = recipe.with_microbatches(False), "auto"
    if recipe.with_microbatches(True) != resolved:
        if is_rank:
            from samestep.recipes.builder import has_batch_norm  # imports torch

            has_norm = has_batch_norm(recipe)
        else:
            uses_torchvision = recipe.data.name in _DATA_OF_TORCHVISION
            modules = (*PRELOAD, "samestep.zoo.images.transforms") if uses_torchvision else PRELOAD
            function = ByName("samestep.recipes.builder", "has_batch_norm")
            has_norm = launch(function, recipe, processes=1, preload=modules)
        resolved = recipe.with_microbatches(has_norm)
        reason = f"auto: the model has {'' if has_norm else 'no '}batch norm"
    count = resolved.microbatch_count
    processes = plural(count * recipe.strategy.ranks_per_model, "process")
    return resolved, f"microbatches: {count} of {microbatch_size(resolved)} ({reason}); at most {processes}"


def microbatch_size(recipe: Recipe) -> str:
    """Return the number of samples of a microbatch as text."""
    samples, rest = divmod(recipe.batch_size, recipe.microbatch_count)
    return f"{samples} or {samples + 1} samples" if rest else plural(samples, "sample")


def load_with_microbatches(arguments: argparse.Namespace, overrides: list[str]) -> Recipe:
    """Return the recipe of a command with a number of microbatches, and print the choice of `auto`."""
    recipe, text = with_microbatches(load_recipe(arguments.recipe, overrides))
    if text is not None:
        progress(arguments)(text)
    return recipe


@dataclass(frozen=True)
class RunPlan:
    """Work of all ranks, as decided by rank 0."""

    recipe: Recipe  # recipe of the run
    folder: Path  # directory of the run
    checkpoint: Path | None = None  # checkpoint to start from, if any
    step: int = 0  # optimizer steps of the checkpoint
    accept_changes: bool = False  # whether the user's code may differ from that of the last start
    tuned: TunedSetting | None = None  # settings that `samestep tune` found for this machine, if used

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        tuned = asdict(self.tuned) if self.tuned else None
        checkpoint = str(self.checkpoint or "")
        return json.dumps(
            [recipe_data(self.recipe), str(self.folder), checkpoint, self.step, self.accept_changes, tuned]
        )

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        """Return the plan from the text of `to_json`."""
        recipe, folder, checkpoint, step, accept_changes, tuned = json.loads(text)
        path = Path(checkpoint) if checkpoint else None
        setting = TunedSetting(**tuned) if tuned else None
        return cls(make_recipe(recipe, (), origin="rank 0's recipe"), Path(folder), path, step, accept_changes, setting)


def plan_to_resume(folder: Path, overrides: list[str], *, trust: bool | Recipe) -> RunPlan:
    """Return the plan that resumes a run from the newest complete checkpoint, or from the beginning without one.

    Raises:
        InputError: there is no such run, or its recipe names code that is not trusted.
        CheckpointError: the checkpoint belongs to another recipe.
    """
    newest = CheckpointFolder(folder / "checkpoints").newest_valid()
    if newest is None:
        _require_run(folder)
        return RunPlan(_read_recipe(folder, overrides, trust=trust), folder)
    return plan_from_checkpoint(folder, str(read_state(newest).progress.step), overrides, trust=trust)


def plan_from_checkpoint(folder: Path, which: str, overrides: list[str], *, trust: bool | Recipe) -> RunPlan:
    """Return the plan that starts from a verified checkpoint of a run: `best`, `last` or a step.

    Raises:
        InputError: there is no such run, or its recipe names code that is not trusted.
        CheckpointError: the checkpoint is damaged or belongs to another recipe.
    """
    _require_run(folder)
    checkpoint = CheckpointFolder(folder / "checkpoints").find(which)
    progress = read_state(checkpoint).progress
    origin = make_saved_recipe(progress.recipe, origin=str(checkpoint))
    recipe = _read_recipe(folder, overrides, trust=trust, origin=origin)
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
    """Require that a run that `samestep train --or-resume` continues has the recipe of the command.

    Raises:
        CheckpointError: the recipes differ.
    """
    if recipe.microbatches == "auto":
        recipe = replace(recipe, microbatches=plan.recipe.microbatches)
    _require_equal(
        recipe_data(plan.recipe),
        recipe_data(recipe),
        f"the recipe differs from the recipe of the run {plan.folder}",
        "another --name for a new run, or undo the change",
    )


def _require_equal(before: dict[str, Any], now: dict[str, Any], message: str, fix: str) -> None:
    changes = differences(before, now)
    if changes:
        raise CheckpointError(
            f"{message}:\n    " + "\n    ".join(changes),
            expected="the same recipe for all steps of a run",
            fix=fix,
            code="E_RECIPE_CHANGED",
        )


def plan_to_replay(folder: Path, step: int, overrides: list[str], *, trust: bool, from_start: bool = False) -> RunPlan:
    """Return the plan that computes a step of a run again, from the nearest checkpoint at or before the step, if any.

    The number of epochs, on which a schedule can depend, is that of the first later checkpoint, if there is one.

    Raises:
        InputError: there is no such run, or its recipe names code that is not trusted.
        CheckpointError: the checkpoint is damaged, or belongs to another recipe.
    """
    steps = {int(path.name.removeprefix("step-")): path for path in CheckpointFolder(folder / "checkpoints").steps()}
    later = [number for number in steps if number >= step]
    if later:
        epochs = read_state(steps[min(later)]).progress.recipe.get("epochs")
        overrides = [*overrides, f"epochs={epochs}"] if isinstance(epochs, int) else overrides
    before = [number for number in steps if number <= step]
    if before and not from_start:
        return plan_from_checkpoint(folder, str(max(before)), overrides, trust=trust)
    _require_run(folder)
    return RunPlan(_read_recipe(folder, overrides, trust=trust), folder)


def _require_run(folder: Path) -> None:
    if not CheckpointFolder(folder / "checkpoints").steps() and not (folder / "recipe.yaml").is_file():
        expected = "a run directory with a recipe.yaml"
        raise InputError(f"{folder} is not a run", expected, "check the path", code="E_NOT_A_RUN")


def _read_recipe(folder: Path, overrides: list[str], *, trust: bool | Recipe, origin: Recipe | None = None) -> Recipe:
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
