"""`samestep train`: a new run of a recipe."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from samestep.cli import device_batch, options
from samestep.config import Recipe, RunOptions
from samestep.errors import EXIT_DONE, EXIT_STOPPED, InputError, SamestepError
from samestep.recipes.parse import load_recipe, shipped_recipes, write_recipe
from samestep.record.values import shown


def add_parser(commands: Any) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe on any number of processes, with the same result.",
        epilog="example: samestep train digits --processes 2 --set epochs=5 --name first",
    )
    parser.add_argument("recipe", help=f"{', '.join(shipped_recipes())}, or a YAML file")
    options.add_set_option(parser)
    device_batch.add_option(parser)
    options.add_machine_options(parser)
    options.add_saving_options(parser)
    options.add_check_option(parser)
    group = parser.add_argument_group("where it goes")
    group.add_argument("--name", help="name of the run (default: recipe, date and time)")
    group.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default runs)")
    options.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when all epochs are done, 130 when somebody asked to end."""
    recipe = load_recipe(arguments.recipe, device_batch.overrides(arguments))
    chosen = options.run_options(arguments)
    folder: Path = arguments.runs / (arguments.name or options.free_name(arguments.runs, Path(arguments.recipe).stem))
    is_first = not folder.parent.exists()
    meant = device_batch.told(arguments, recipe)
    _create(folder, recipe)
    if meant and not arguments.json:
        print(meant, file=sys.stderr)
    try:
        return run_ranks(arguments, recipe, chosen, folder)
    except SamestepError as error:
        if error.exit_code in (InputError.exit_code, EXIT_STOPPED):
            _remove_if_empty(folder, with_parent=is_first)
        raise


def run_ranks(
    arguments: argparse.Namespace,
    recipe: Recipe,
    chosen: RunOptions,
    folder: Path,
    checkpoint: Path | None = None,
    first_step: int = 0,
) -> int:
    """Train in `folder`, from a checkpoint if one is given, and print the summary."""
    summary = options.launch_ranks(
        "train",
        recipe,
        chosen,
        folder,
        checkpoint,
        first_step,
        processes=arguments.processes,
        device=arguments.device,
        log_dir=folder / "logs",
    )
    if arguments.json:
        options.print_json({**summary, "run": str(folder)})
    else:
        _print_summary(summary, folder)
    return EXIT_STOPPED if summary["stopped"] else EXIT_DONE


def _create(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(
            f"the run {folder} exists",
            rule="a new run has a new name; nothing is written over",
            do=f"--name another, or samestep resume {folder}",
        ) from error
    except OSError as error:
        raise InputError(
            f"the run {folder} cannot be made: {error.strerror}", rule="a folder that can be written", do="--runs DIR"
        ) from error
    write_recipe(recipe, folder / "recipe.yaml")


def _remove_if_empty(folder: Path, *, with_parent: bool) -> None:
    """Take a run away again that bad input ended before its first checkpoint, so that its name is free."""
    if not (folder / "checkpoints").exists():
        shutil.rmtree(folder)
        if with_parent and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    values = {name: value for name, value in summary["evaluation"].items() if name not in ("loss", "samples")}
    lines = [f"{name:<12}{shown(name, value)}" for name, value in values.items()]
    if summary["evaluation"]:
        lines.append(f"{'evaluated':<12}{summary['evaluation']['samples']:,} samples")
    if summary["samples_per_second"]:
        lines.append(f"{'speed':<12}{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s in all")
    lines.append(f"{'run':<12}{folder}")
    if summary["stopped"]:
        lines.append(f"{'stopped':<12}after step {summary['step']}; go on with: samestep resume {folder}")
    else:
        lines.append(f"{'curves':<12}tensorboard --logdir {folder / 'tensorboard'}")
        lines.append(f"{'evaluate':<12}samestep eval {folder}")
    print("\n".join(lines))
