"""Recipe of a command: options of recipe, strategy, batch size, and the number of microbatches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import (
    SetOption,
    argument,
    integers,
    option,
    option_conflict,
    require_file,
)
from samestep.config import MeshConfig, Recipe, StrategyConfig
from samestep.config.strategy import AXES, StrategyName
from samestep.errors import InputError
from samestep.recipes.recipe_files import load_recipe, shipped_recipes
from samestep.units import plural

_RECIPES = ", ".join(shipped_recipes())
# Options without a meaning for a script.
_OF_RECIPES = (
    "overrides",
    "strategy",
    "mesh",
    "shares",
    "per_device_batch_size",
    "accumulate",
    "workers",
)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(SetOption):
    """Recipe with overrides."""

    recipe: str = argument("RECIPE", f"{_RECIPES}, or a YAML file")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(RecipeOptions):
    """Recipe, or a script with its arguments after `--`."""

    recipe: str = argument(
        "SUBJECT", f"{_RECIPES}, a YAML file; or a Python script, with its arguments after --"
    )
    script_arguments: Sequence[str] = ()

    def script(self) -> Path | None:
        """Return the script; None for a recipe."""
        path = Path(self.recipe)
        if path.suffix != ".py":
            if self.script_arguments:
                raise option_conflict(
                    f"{self.recipe} with arguments after --", "--set KEY=VALUE for a recipe"
                )
            return None
        for name in _OF_RECIPES:
            if getattr(self, name, None):
                raise option_conflict(
                    f"{name} of a recipe with a script", "set the value in the script"
                )
        require_file(path)
        return path


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Parallel strategy in place of that of the recipe."""

    group: ClassVar = "strategy (results are equal to rounding; under exact to the bit, tp with step.tensor_slices)"

    strategy: StrategyName | None = option("parallel strategy (docs/guides/strategies/index.md)")
    mesh: str | None = option(f"sizes of the axes {', '.join(AXES)}", "AXIS=N,...")
    shares: tuple[int, ...] | None = option(
        "microbatches of each rank, for devices of different speeds, such as 5,3",
        "N,...",
        type=integers,
    )

    def strategy_overrides(self) -> list[str]:
        """Return the overrides of the recipe of these options."""
        section: dict[str, Any] = {}
        if self.mesh is not None:
            section["mesh"] = _parse_mesh(self.mesh, f"--mesh {self.mesh}")
        if self.shares is not None:
            section["shares"] = self.shares
        if self.strategy is not None:
            # Replaces the complete section: options of another strategy have no meaning for this
            # one.
            return [f"strategy={json.dumps({'name': self.strategy, **section})}"]
        return [f"strategy.{key}={json.dumps(value)}" for key, value in section.items()]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Batch size by process."""

    per_device_batch_size: int | None = option(
        "samples of each process and part: sets batch_size of the run", "N"
    )
    accumulate: int | None = option("parts of each batch, computed one after another", "K")

    def batch_overrides(self, overrides: Sequence[str], processes: str) -> list[str]:
        """Return overrides of a recipe with those of these options.

        A batch has `per_device_batch_size` samples for each process and each of `accumulate` parts.
        """
        options = {"batch_size": self.per_device_batch_size, "accumulate": self.accumulate}
        options = {key: value for key, value in options.items() if value is not None}
        sizes = self.per_device_batch_size is not None
        others = []
        if sizes and not processes.isdigit():  # must not depend on the machine
            others += [f"--processes {processes}"]
        others += [
            f"--set {override}" for override in overrides if override.partition("=")[0] in options
        ]
        if others:
            expected = "a number of processes, and one option for a key"
            value = f"--per-device-batch-size or --accumulate with {others[0]}"
            raise InputError(
                value, expected, "--processes 2, or --set instead", code="E_BATCH_SIZE"
            )
        own = list(overrides)
        if self.accumulate is not None:
            own.append(f"accumulate={self.accumulate}")
        if self.per_device_batch_size is not None:
            samples = (
                self.per_device_batch_size * parse_process_count(processes) * (self.accumulate or 1)
            )
            own.append(f"batch_size={samples}")
        return own


def parse_strategy(text: str) -> StrategyConfig:
    """Return the strategy of `NAME` or `NAME:AXIS=N,...`."""
    name, colon, sizes = text.partition(":")
    mesh = MeshConfig(**_parse_mesh(sizes, f"--layout {text}")) if colon else MeshConfig()
    return StrategyConfig(name=name, mesh=mesh)  # type: ignore[arg-type]


def _parse_mesh(text: str, option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if (
            axis not in AXES
            or not (size.isascii() and size.isdigit())
            or int(size) < 1
            or axis in sizes
        ):
            expected = f"AXIS=N, separated by commas, each axis once: {', '.join(AXES)}"
            raise InputError(option, expected, "--mesh replicate=2,tensor=2", code="E_MESH")
        sizes[axis] = int(size)
    return sizes


def load_resolved(name: str, overrides: Sequence[str], report: Callable[[str], None]) -> Recipe:
    """Return a recipe with a number of microbatches, and report the choice of `auto`."""
    recipe = load_recipe(name, overrides)
    if recipe.microbatches != "auto":
        return recipe
    resolved = recipe.with_microbatches()
    count = resolved.microbatch_count
    processes = plural(count * recipe.strategy.ranks_per_model, "process")
    report(f"microbatches: {count} (auto); at most {processes}")
    return resolved
