"""`samestep train`: training of a recipe on any number of processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

from samestep.cli.external_launcher import ReportedError
from samestep.cli.options import option, option_conflict, output_errors, timed_name
from samestep.cli.recipe_options import BatchOptions, RecipeOptions
from samestep.cli.run_plans import RunPlan, plan_to_resume, require_same_recipe
from samestep.cli.training import TrainingOptions, run_training, trained_run
from samestep.distributed.disk_operations import HeldFolder
from samestep.errors import EXIT_STOPPED, InputError, SamestepError
from samestep.microbatches import require_enough_microbatches
from samestep.recipes.recipe_files import load_recipe, write_recipe
from samestep.recipes.trust import sign
from samestep.runs import require_run_name


@dataclass(frozen=True, kw_only=True)
class Options(TrainingOptions, BatchOptions, RecipeOptions):
    """Train a recipe on any number of processes, with the same result: to rounding, or with --exact to the bit."""

    example: ClassVar = "samestep train digits --processes 2 --set epochs=5 --name first"
    group: ClassVar = "output"

    name: str | None = option("name of the run (default: recipe, date and time)")
    exact: bool = option(
        "the same bits on every number of processes: step.reduction=exact", default=False
    )
    or_resume: bool = option("resume the run of this --name if it exists", default=False)
    runs: Path = option("folder of runs (default runs)", "DIR", default=Path("runs"))

    @property
    def all_overrides(self) -> list[str]:
        """Overrides of the recipe, without those of the batch."""
        exact = ["step.reduction=exact"] if self.exact else []
        return [*self.strategy_overrides(), *exact, *self.overrides]


def run(options: Options) -> int:
    """Train; return 0 after all epochs, 130 after a request to stop."""
    new_run = NewRun(options)
    with new_run.removed_after_invalid_input():
        return run_training(options, new_run.plan)


def train(
    recipe: str | Path, overrides: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train a recipe as `samestep train` does, and return the summary of the run.

        samestep.train("images", {"data.options.path": "photos", "epochs": 5}, processes=2,
        name="first")

    Ranks are new processes, so a script calls this below `if __name__ == "__main__":`. In a script
    that torchrun, srun or mpirun has started, this process is a rank.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: values of keys of the recipe, as of `--set`: numbers, text, booleans, None, lists
            and mappings.
        options: options of `samestep train` by their names, such as `processes`, `name`, `exact`,
            `strategy`, `or_resume`, `runs` and `max_restarts`. Times are seconds.

    Returns:
        `step`, `stopped` (after a stop request), `skipped_steps`, `evaluation` (the values of the
        last one), `best`, `seconds`, `samples_per_second` and `run`, the directory.

    Raises:
        InputError: the recipe, a key or an option is invalid.
        RankError: a rank failed; the run can be resumed if it has a checkpoint.
        NonFiniteError: most steps were skipped.
    """
    known = {entry.name for entry in fields(Options) if entry.metadata} - {
        "recipe",
        "overrides",
        "json",
    }
    for name in options:
        if name not in known:
            raise InputError(
                f"samestep.train has no option {name}",
                expected=f"options of samestep train: {', '.join(sorted(known))}",
                fix="keys of the recipe belong into the second argument: samestep.train(recipe, {key: value})",
                code="E_UNKNOWN_OPTION",
            )
    if "processes" in options:
        options["processes"] = str(options["processes"])
    if "runs" in options:
        options["runs"] = Path(options["runs"])
    texts = [f"{key}={json.dumps(value, default=str)}" for key, value in (overrides or {}).items()]
    new_run = NewRun(Options(recipe=str(recipe), overrides=texts, **options))
    try:
        with new_run.removed_after_invalid_input():
            run = trained_run(new_run.options, new_run.plan)
    except ReportedError as error:
        raise SystemExit(error.exit_code) from None
    run.require_finite_steps()
    return {**run.summary, "run": str(run.folder)}


class NewRun:
    """Directory of a new run, removed if invalid input ends the run before the first checkpoint."""

    def __init__(self, options: Options) -> None:
        if options.or_resume and not options.name:
            raise option_conflict("--or-resume without --name", "--name NAME")
        self.options = options
        self._folder: HeldFolder | None = None
        self._creates_runs = False

    def plan(self, restarts: int) -> RunPlan:
        """Create the run; with `--or-resume`, or after a restart by a launcher, resume the run of this name."""
        options = self.options
        if options.name is not None:
            require_run_name(options.name, "--name first, or --runs DIR for another folder")
        if (
            (restarts or options.or_resume)
            and options.name is not None
            and (options.runs / options.name).exists()
        ):
            trusted = load_recipe(options.recipe, options.all_overrides)
            plan = plan_to_resume(options.runs / options.name, options.all_overrides, trust=trusted)
            if not restarts:
                require_same_recipe(plan, trusted)
            return plan
        overrides = options.batch_overrides(options.all_overrides, options.size)
        recipe = load_recipe(options.recipe, overrides).with_microbatches()
        if options.per_device_batch_size is not None:
            require_enough_microbatches(recipe.microbatch_count, int(options.size))
        folder = options.runs / (
            options.name or timed_name(options.runs, Path(options.recipe).stem)
        )
        self._create(folder)
        write_recipe(recipe, folder / "recipe.yaml")
        sign(folder, recipe)
        return RunPlan(recipe, folder)

    def _create(self, folder: Path) -> None:
        self._creates_runs = not folder.parent.exists()
        with output_errors(
            f"the run {folder} cannot be created", "a writable folder", "--runs DIR"
        ):
            try:
                folder.mkdir(parents=True)
            except FileExistsError as error:
                fix = f"--name with another name, or samestep resume {quote(str(folder))}"
                raise InputError(
                    f"the run {folder} exists", "the name of a new run", fix, code="E_OUTPUT"
                ) from error
        self._folder = HeldFolder(folder)

    @contextmanager
    def removed_after_invalid_input(self) -> Iterator[None]:
        """Remove the directory, so that the name is free, if input or a stop ends the block before a checkpoint."""
        try:
            yield
        except KeyboardInterrupt:
            self._remove_without_checkpoint()
            raise
        except SamestepError as error:
            if error.exit_code in (InputError.exit_code, EXIT_STOPPED) or error.code == "E_OUTPUT":
                self._remove_without_checkpoint()
            raise

    def _remove_without_checkpoint(self) -> None:
        if (
            self._folder is None or not self._folder.is_in_place()
        ):  # another run can have the path by now
            return
        path = self._folder.path
        if not (path / "checkpoints").exists():
            shutil.rmtree(path)
            if self._creates_runs and not any(path.parent.iterdir()):
                path.parent.rmdir()
