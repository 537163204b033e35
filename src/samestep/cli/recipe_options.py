"""Recipe of a command: options of the strategy, the batch size and the number of microbatches."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

from samestep.cli.commands import PRELOAD
from samestep.cli.launch_options import parse_process_count
from samestep.cli.options import progress
from samestep.config import MeshConfig, Recipe, StrategyConfig
from samestep.config.strategy import AXES, StrategyName
from samestep.errors import InputError
from samestep.launcher.launch import launch
from samestep.launcher.pickling import ByName
from samestep.recipes.recipe_files import (
    load_recipe,
)
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
    text = "share of the microbatches of each rank, for devices of different speeds, such as 5,3 for 8 microbatches"
    group.add_argument("--shares", metavar="N,...", help=text)


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


def _parse_shares(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        expected = "a positive number for each rank that shares the data, separated by commas"
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
    count = parse_process_count(processes, "")
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
