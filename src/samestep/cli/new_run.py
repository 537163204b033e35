"""Options that `samestep train` and `resume` share, and the directory of a new run."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

from samestep.cli.external_launcher import reported_by_rank_0
from samestep.cli.launch_options import LaunchOptions, add_fault_options
from samestep.cli.options import add_machine_options, output_errors, run_options, timed_name, unused_name
from samestep.cli.recipe_options import (
    add_strategy_options,
    all_overrides,
    microbatch_size,
    with_batch_size,
    with_microbatches,
)
from samestep.cli.run_plans import RunPlan, plan_to_resume, require_same_recipe
from samestep.config import DEFAULT_CHECKSUM_EVERY, DEFAULT_KEEP, LOGGERS, Recipe, RunOptions
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.logging import logger
from samestep.errors import InputError
from samestep.microbatches import require_enough_microbatches
from samestep.recipes.recipe_files import load_recipe, write_recipe
from samestep.recipes.trust import sign
from samestep.runs import require_run_name
from samestep.units import parse_duration, plural


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `train` and `resume` share."""
    add_machine_options(parser)
    add_strategy_options(parser)
    group = parser.add_argument_group("checkpoints")
    text = "steps between checkpoints within epochs (default: none)"
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS", help=text)
    text = "limit of the work that a kill can cost, such as 30s, 5m, 1h"
    group.add_argument("--max-lost-work", type=partial(parse_duration, "--max-lost-work"), metavar="TIME", help=text)
    text = f"newest checkpoints to keep (default {DEFAULT_KEEP}; for a resumed run, that of its last start)"
    group.add_argument("--keep", type=int, metavar="K", help=text)
    group = parser.add_argument_group("checks (results do not depend on these options)")
    text = "steps between comparisons of the ranks' weights; also checks every collective"
    group.add_argument("--check-every", type=int, metavar="STEPS", help=text)
    text = f"steps between logged checksums of the state; 0 for none (default {DEFAULT_CHECKSUM_EVERY})"
    group.add_argument("--checksum-every", type=int, metavar="STEPS", help=text)
    text = "steps between steps in which a second rank repeats a microbatch of each rank and compares the bits"
    group.add_argument("--witness-every", type=int, metavar="STEPS", help=text)
    group = parser.add_argument_group("logging (results do not depend on this option)")
    group.add_argument(
        "--loggers",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=",".join(RunOptions.loggers),
        metavar="NAME,...",
        help=f"loggers of metrics and events: {', '.join(LOGGERS)} (default {','.join(RunOptions.loggers)})",
    )
    add_fault_options(parser, requeue=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options that `train` and `resume` share."""

    launch: LaunchOptions
    run: RunOptions  # options of the run; `quiet` selects JSON output
    overrides: list[str]  # overrides of the recipe

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> TrainingOptions:
        with reported_by_rank_0():
            return cls(
                launch=LaunchOptions.parse(arguments),
                run=run_options(arguments),
                overrides=all_overrides(arguments),
            )

    def with_microbatches(self, recipe: Recipe) -> Recipe:
        """Return the recipe with a number of microbatches, and print the choice of `auto`."""
        resolved, text = with_microbatches(recipe, is_rank=self.launch.rendezvous is not None)
        if text is not None and not self.run.quiet:
            logger.info(text)
        return resolved


@dataclass
class NewRun:
    """Directory of a new run, removed if invalid input ends the run before the first checkpoint."""

    recipe: str
    name: str | None
    runs: Path
    device_batch_size: int | None
    accumulate: int | None
    or_resume: bool = False  # resume the run of this name if it exists
    folder: HeldFolder | None = None
    creates_parent: bool = False

    def plan(self, options: TrainingOptions, restarts: int) -> RunPlan:
        """Create the run; with `or_resume`, or after a restart by a launcher, resume the run of this name."""
        if self.name is not None:
            require_run_name(self.name, "--name first, or --runs DIR for another folder")
        if (restarts or self.or_resume) and self.name is not None and (self.runs / self.name).exists():
            trusted = load_recipe(self.recipe, options.overrides)
            plan = plan_to_resume(self.runs / self.name, options.overrides, trust=trusted)
            if not restarts:
                require_same_recipe(plan, trusted)
            return plan
        processes, size = options.launch.processes, self.device_batch_size
        recipe = options.with_microbatches(
            load_recipe(self.recipe, with_batch_size(options.overrides, size, processes, self.accumulate))
        )
        if size is not None or self.accumulate is not None:
            require_enough_microbatches(recipe.microbatch_count, int(processes), recipe.batch_size)
        name = timed_name(self.runs, Path(self.recipe).stem) if self.name is None else self.name
        folder = self.runs / name
        self.creates_parent = not folder.parent.exists()
        _create_folder(folder)
        self.folder = HeldFolder(folder)
        write_recipe(recipe, folder / "recipe.yaml")
        sign(folder, recipe)
        if restarts:
            logger.warning("restart %d starts the new run %s; --name NAME resumes a run", restarts, folder)
        if (size is not None or self.accumulate is not None) and not options.run.quiet:
            logger.info(_describe_batch(recipe, size, self.accumulate, int(processes)))
        return RunPlan(recipe, folder)

    def remove_without_checkpoint(self) -> None:
        """Remove the directory, so that the name is free, unless the run has a checkpoint."""
        if self.folder is None or not self.folder.is_in_place():  # another run can have the path by now
            return
        path = self.folder.path
        if not (path / "checkpoints").exists():
            shutil.rmtree(path)
            if self.creates_parent and not any(path.parent.iterdir()):
                path.parent.rmdir()


def _describe_batch(recipe: Recipe, size: int | None, accumulate: int | None, processes: int) -> str:
    """Return the effect of `--per-device-batch-size` and `--accumulate`, in one line."""
    count, microbatches = plural(processes, "process"), plural(recipe.microbatch_count, "microbatch")
    if accumulate is None:
        return f"global batch {recipe.batch_size} = {size} per device x {count}, in {microbatches}, saved in the recipe"
    return (
        f"global batch {recipe.batch_size} = {microbatches} of {microbatch_size(recipe)}: {accumulate} per step on "
        f"each of {count}, saved in the recipe"
    )


def _create_folder(folder: Path) -> None:
    with output_errors(f"the run {folder} cannot be created", "a writable folder", "--runs DIR"):
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise InputError(
                f"the run {folder} exists",
                expected="a new name for a new run: no run is overwritten",
                fix=f"--name {quote(unused_name(folder.parent, folder.name))}, or samestep resume {quote(str(folder))}",
                code="E_OUTPUT",
            ) from error
