"""Recipe of a command: options of recipe, strategy, batch size, and the number of microbatches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import SetOption, argument, integers, option, option_conflict, require_file
from samestep.config import MeshConfig, Recipe, StrategyConfig
from samestep.config.strategy import AXES, StrategyName
from samestep.errors import InputError
from samestep.launcher.launch import launch
from samestep.launcher.pickling import ByName
from samestep.recipes.recipe_files import load_recipe, shipped_recipes
from samestep.units import plural

# Data whose modules import torchvision: once for the worker that builds the model, and for the ranks.
_DATA_OF_TORCHVISION = ("images", "image_list", "hub_images", "stream_images")
_RECIPES = ", ".join(shipped_recipes())
# Options without a meaning for a script.
_OF_RECIPES = ("overrides", "strategy", "mesh", "shares", "per_device_batch_size", "accumulate", "workers")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(SetOption):
    """Recipe with overrides."""

    recipe: str = argument("RECIPE", f"{_RECIPES}, or a YAML file")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(RecipeOptions):
    """Recipe, or a script, whose arguments follow `--`."""

    recipe: str = argument("SUBJECT", f"{_RECIPES}, a YAML file; or a Python script, with its arguments after --")
    script_arguments: Sequence[str] = ()

    def script(self) -> Path | None:
        """Return the script; None for a recipe."""
        path = Path(self.recipe)
        if path.suffix != ".py":
            if self.script_arguments:
                raise option_conflict(f"{self.recipe} with arguments after --", "--set KEY=VALUE for a recipe")
            return None
        for name in _OF_RECIPES:
            if getattr(self, name, None):
                raise option_conflict(f"{name} of a recipe with a script", "set the value in the script")
        require_file(path)
        return path


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Parallel strategy in place of that of the recipe."""

    group: ClassVar = "strategy (results are equal, under tp without step.tensor_slices to rounding)"

    strategy: StrategyName | None = option("parallel strategy (docs/guides/strategies/index.md)")
    mesh: str | None = option(f"sizes of the axes {', '.join(AXES)}", "AXIS=N,...")
    shares: tuple[int, ...] | None = option(
        "microbatches of each rank, for devices of different speeds, such as 5,3", "N,...", type=integers
    )

    def strategy_overrides(self) -> list[str]:
        """Return the overrides of the recipe of these options."""
        section: dict[str, Any] = {}
        if self.mesh is not None:
            section["mesh"] = _parse_mesh(self.mesh, f"--mesh {self.mesh}")
        if self.shares is not None:
            section["shares"] = self.shares
        if self.strategy is not None:
            # Replaces the complete section: options of another strategy have no meaning for this one.
            return [f"strategy={json.dumps({'name': self.strategy, **section})}"]
        return [f"strategy.{key}={json.dumps(value)}" for key, value in section.items()]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch size by process."""

    per_device_batch_size: int | None = option("samples of each microbatch: sets batch_size of the run", "N")
    accumulate: int | None = option("set microbatches to K times --processes: K microbatches of each process", "K")

    def batch_overrides(self, overrides: Sequence[str], processes: str) -> list[str]:
        """Return overrides of a recipe with those of these options.

        Each process has `accumulate` microbatches, of `per_device_batch_size` samples if this is set. Without
        `--accumulate`, it has one microbatch, unless the overrides set `microbatches`.
        """
        options = {"batch_size": self.per_device_batch_size, "microbatches": self.accumulate}
        options = {key: value for key, value in options.items() if value is not None}
        if not options:
            return list(overrides)
        others = [f"--processes {processes}"] if not processes.isdigit() else []  # must not depend on the machine
        others += [f"--set {override}" for override in overrides if override.partition("=")[0] in options]
        if others:
            expected = "a number of processes, and one option for a key"
            value = f"--per-device-batch-size or --accumulate with {others[0]}"
            raise InputError(value, expected, "--processes 2, or --set instead", code="E_BATCH_SIZE")
        microbatches = parse_process_count(processes) * (self.accumulate or 1)
        sizes = []
        if self.per_device_batch_size is not None:
            sizes = [f"batch_size={self.per_device_batch_size * microbatches}"]
        return [f"microbatches={microbatches}", *overrides, *sizes]


def parse_strategy(text: str) -> StrategyConfig:
    """Return the strategy of `NAME` or `NAME:AXIS=N,...`."""
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
    return resolved, f"microbatches: {count} ({reason}); at most {processes}"


def load_resolved(name: str, overrides: Sequence[str], report: Callable[[str], None]) -> Recipe:
    """Return a recipe with a number of microbatches, and report the choice of `auto`."""
    recipe, text = with_microbatches(load_recipe(name, overrides))
    if text is not None:
        report(text)
    return recipe
