"""Recipe of a command: options of the strategy and the batch size, and plans that start from checkpoints of runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from samestep.checkpoint.store import CheckpointFolder, read_origin
from samestep.cli.launch_options import parse_process_count
from samestep.config import MeshConfig, Recipe, StrategyConfig
from samestep.config.strategy import AXES, StrategyName
from samestep.errors import CheckpointError, InputError
from samestep.recipes.recipe_files import differences, make_recipe, read_recipe, recipe_data
from samestep.tools.tune.settings import TunedSetting


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add `--strategy` and `--mesh`."""
    group = parser.add_argument_group("strategy (results are equal: to the bit under ddp, otherwise to rounding)")
    text = "parallel strategy instead of the recipe's (docs/guides/strategies/index.md)"
    group.add_argument("--strategy", choices=get_args(StrategyName), help=text)
    text = f"sizes of the axes {', '.join(AXES)}; the product is the number of processes"
    group.add_argument("--mesh", metavar="AXIS=N,...", help=text)


def all_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of `--strategy` and `--mesh`, followed by those of `--set`.

    Raises:
        InputError: the mesh is invalid.
    """
    strategy, mesh = arguments.strategy, arguments.mesh
    sizes = _parse_mesh(mesh, f"--mesh {mesh}") if mesh is not None else {}
    if strategy is not None:
        # Replaces the complete section: options of another strategy have no meaning for this one.
        return [f"strategy={json.dumps({'name': strategy, 'mesh': sizes})}", *arguments.overrides]
    return [*([f"strategy.mesh={json.dumps(sizes)}"] if sizes else []), *arguments.overrides]


def parse_strategy(text: str) -> StrategyConfig:
    """Return the strategy of `NAME` or `NAME:AXIS=N,...`.

    Raises:
        InputError: there is no such strategy or axis.
    """
    name, colon, sizes = text.partition(":")
    mesh = MeshConfig(**_parse_mesh(sizes, f"--layout {text}")) if colon else MeshConfig()
    return StrategyConfig(name=name, mesh=mesh)  # type: ignore[arg-type]


def _parse_mesh(text: str, option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not (size.isascii() and size.isdigit()) or int(size) < 1 or axis in sizes:
            expected = f"AXIS=N, separated by commas, each axis once: {', '.join(AXES)}"
            raise InputError(option, expected, "--mesh replicate=2,tensor=2", code="E_MESH")
        sizes[axis] = int(size)
    return sizes


def with_batch_size(overrides: list[str], size: int | None, processes: str) -> list[str]:
    """Return overrides of a recipe with the one of `--per-device-batch-size`, if the option has a value.

    Raises:
        InputError: `processes` is not a number, or the overrides set `batch_size` too.
    """
    if size is None:
        return overrides
    if not processes.isdigit():
        raise InputError(
            f"--per-device-batch-size {size} with --processes {processes}",
            expected="a number of processes: batch_size counts the samples of all of them and must not depend on the "
            "machine",
            fix=f"--processes 2 for batch_size={2 * size}, or --set batch_size={2 * size} instead",
            code="E_BATCH_SIZE",
        )
    duplicates = [override for override in overrides if override.partition("=")[0] == "batch_size"]
    if duplicates:
        raise InputError(
            f"--per-device-batch-size {size} and --set {duplicates[-1]}",
            expected="one option for the global batch size",
            fix="leave one of the two options out",
            code="E_BATCH_SIZE",
        )
    return [*overrides, f"batch_size={size * parse_process_count(processes)}"]


@dataclass(frozen=True)
class RunPlan:
    """Work of all ranks, as decided by rank 0."""

    recipe: Recipe  # recipe of the run
    folder: Path  # directory of the run
    checkpoint: Path | None = None  # checkpoint to start from, if any
    step: int = 0  # optimizer steps of the checkpoint
    tuned: TunedSetting | None = None  # settings that `samestep tune` found for this machine, if used

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        tuned = asdict(self.tuned) if self.tuned else None
        return json.dumps([recipe_data(self.recipe), str(self.folder), str(self.checkpoint or ""), self.step, tuned])

    @classmethod
    def from_json(cls, text: str) -> RunPlan:
        """Return the plan from the text of `to_json`."""
        recipe, folder, checkpoint, step, tuned = json.loads(text)
        path = Path(checkpoint) if checkpoint else None
        setting = TunedSetting(**tuned) if tuned else None
        return cls(make_recipe(recipe, (), origin="rank 0's recipe"), Path(folder), path, step, setting)


def plan_to_resume(folder: Path, overrides: list[str]) -> RunPlan:
    """Return the plan that resumes a run from the newest complete checkpoint, or from the beginning without one.

    Raises:
        InputError: there is no such run.
        CheckpointError: the checkpoint belongs to another recipe.
    """
    newest = CheckpointFolder(folder / "checkpoints").newest_valid()
    if newest is None:
        return RunPlan(_read_recipe(folder, overrides), folder)
    return plan_from_checkpoint(folder, str(read_origin(newest)[0]), overrides)


def plan_from_checkpoint(folder: Path, which: str, overrides: list[str]) -> RunPlan:
    """Return the plan that starts from a verified checkpoint of a run: `best`, `last` or a step.

    Raises:
        InputError: there is no such run.
        CheckpointError: the checkpoint is damaged or belongs to another recipe.
    """
    recipe = _read_recipe(folder, overrides)
    checkpoint = CheckpointFolder(folder / "checkpoints").find(which)
    step, origin = read_origin(checkpoint)
    before, now = recipe_data(make_recipe(origin, (), origin=str(checkpoint))), recipe_data(recipe)
    # A run can be resumed with another strategy.
    changes = differences({**before, "strategy": None}, {**now, "strategy": None})
    if changes:
        raise CheckpointError(
            "the recipe differs from the recipe of the checkpoint:\n    " + "\n    ".join(changes),
            expected="the same recipe for all steps of a run",
            fix="undo the change, or start a new run from these weights: samestep train ... "
            f"--set model.pretrained={checkpoint}/model.safetensors",
            code="E_RECIPE_CHANGED",
        )
    return RunPlan(recipe, folder, checkpoint, step)


def _read_recipe(folder: Path, overrides: list[str]) -> Recipe:
    path = folder / "recipe.yaml"
    if not path.is_file():
        expected = "a run directory with a recipe.yaml"
        raise InputError(f"{folder} is not a run", expected, "check the path", code="E_NOT_A_RUN")
    return read_recipe(path, overrides)
