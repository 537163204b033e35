"""`samestep train`, `samestep resume` and `samestep.train`: training on any number of ranks."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from samestep.checkpoint.store import CheckpointFolder
from samestep.cli.batch_options import BatchOptions
from samestep.cli.launch_options import (
    FaultOptions,
    ReportedError,
    requeue_after,
    run_as_rank,
    slurm_restarts,
)
from samestep.cli.options import (
    JsonOption,
    RecipeOptions,
    RunArgument,
    SetOption,
    StrategyOptions,
    WorkersOption,
    count,
    names,
    option,
    option_conflict,
    options_of,
    output_errors,
    timed_name,
)
from samestep.cli.run_plans import RunPlan, plan_from_checkpoint, plan_to_resume, step_of
from samestep.config import DEFAULT_CHECKSUM_EVERY, DEFAULT_KEEP, LOGGERS, RunOptions
from samestep.distributed.disk_operations import HeldFolder
from samestep.distributed.logging import logger
from samestep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    InputError,
    NonFiniteError,
    SamestepError,
)
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.launcher.launch import LaunchConfig, LaunchResult, end_unguarded_import
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import tensorboard_command
from samestep.microbatches import require_microbatches
from samestep.number_text import plural
from samestep.recipes.overrides import recipe_schema
from samestep.recipes.recipe_files import (
    load_recipe,
    recipe_data,
    require_paths,
    require_recipe_of_run,
    write_recipe,
)
from samestep.recipes.trust import remember
from samestep.runs import RunResult, require_run_name


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints of a run."""

    group: ClassVar = "checkpoints"

    checkpoint_every: int | None = option(
        "steps between checkpoints within epochs (default: none)", "STEPS"
    )
    keep: int | None = option(
        f"newest checkpoints to keep (default {DEFAULT_KEEP}, or as before)", "K"
    )


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Checks and loggers of a run."""

    group: ClassVar = "checks and logging (results do not depend on these options)"

    checksum_every: int = option(
        f"steps between checksums of the state (default {DEFAULT_CHECKSUM_EVERY}; 0: none)",
        "STEPS",
        default=DEFAULT_CHECKSUM_EVERY,
        type=count,
    )
    loggers: tuple[str, ...] = option(
        f"loggers of metrics and events: {', '.join(LOGGERS)}",
        "NAME,...",
        default=RunOptions.loggers,
        type=names,
    )


@dataclass(frozen=True)
class TrainedRun:
    """Result of a training.

    Attributes:
        summary: values that the function `train` of `recipes.run` returns.
        folder: directory of the run.
        stop_signal: signal that requested the end, if any.
        has_failed: whether most steps were skipped.
    """

    summary: dict[str, Any]
    folder: Path
    stop_signal: int | None
    has_failed: bool

    @property
    def skipped_steps(self) -> str:
        """Number of skipped steps as text."""
        skipped = f"{self.summary['skipped_steps']} of {plural(self.summary['step'], 'step')}"
        return f"{skipped}, because loss or gradient was not finite"

    def require_finite_steps(self) -> None:
        """Raise a `NonFiniteError` if most steps were skipped."""
        if self.has_failed and not self.summary["stopped"]:
            raise NonFiniteError(
                f"the run skipped {self.skipped_steps}",
                "most steps update the weights",
                "lower the learning rate, or find the first such step with step.non_finite=stop, "
                "in a new run",
            )

    def lines(self) -> list[str]:
        """Return the summary for the terminal."""
        summary = self.summary
        evaluation = summary["evaluation"]
        lines = []
        for name in sorted(evaluation, key=lambda one: one == "loss"):
            if name == "samples":
                continue
            text = format_metric(name, evaluation[name])
            if summary.get(f"train_{name}") is not None:
                text += f", in training {format_metric(name, summary[f'train_{name}'])}"
            label = "val loss" if name == "loss" else name
            lines.append((label, text))
        if summary["best"] is not None:
            name = summary["best_by"]
            best = f"{name} {format_metric(name, summary['best'])} (epoch {summary['best_epoch']})"
            if name in evaluation:
                best += f", last {format_metric(name, evaluation[name])}"
            lines.append(("best", best))
        if evaluation:
            lines.append(("evaluated", f"{evaluation['samples']:,} samples"))
        if summary["samples_per_second"]:
            speed = f"{summary['samples_per_second']:,.0f} samples/s"
            lines.append(("speed", f"{speed}, {summary['seconds']:.1f} s in all"))
        if summary["skipped_steps"]:
            lines.append(("skipped", self.skipped_steps))
        lines.append(("run", str(self.folder)))
        if summary["stopped"]:
            resume = _command("resume", self.folder)
            lines.append(("stopped", f"after step {summary['step']}; resume with: {resume}"))
        else:
            if (self.folder / "tensorboard").exists():
                lines.append(("curves", tensorboard_command(self.folder / "tensorboard")))
            lines.append(("evaluate", _command("eval", self.folder)))
        width = max(12, *(len(name) + 2 for name, _ in lines))
        return [f"{name:<{width}}{text}" for name, text in lines]


def _command(name: str, folder: Path) -> str:
    return shlex.join(["samestep", name, str(folder)])


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(
    JsonOption, CheckOptions, CheckpointOptions, StrategyOptions, WorkersOption, FaultOptions
):
    """Options that `train` and `resume` share, and the training."""

    default_size: ClassVar = "auto"

    requeue: bool = option(
        "under Slurm: requeue the job after a stop by SIGUSR1 (sbatch --signal)", default=False
    )

    @abstractmethod
    def make_plan(self, restarts: int) -> RunPlan:
        """Return the plan after a number of restarts by a launcher or by Slurm."""

    def train(self) -> TrainedRun:
        """Train; under a launcher, as one of its ranks."""
        stop_signal: int | None = None
        if self.rank_place is None:
            plan = self.make_plan(slurm_restarts(self.requeue))
            result = self._launch(plan)
            summary = result.value
            stop_signal = result.stop_signal
        else:
            plan, summary = run_as_rank(self, "train", self.make_plan, self._rank_arguments)
        # A signal can reach the launcher, or a rank alone, as from Slurm.
        own_signal = summary.pop("stop_signal")
        has_failed = summary.pop("has_failed")
        return TrainedRun(summary, plan.folder, stop_signal or own_signal, has_failed)

    def run(self) -> int:
        """Train, print the summary, requeue the Slurm job if requested; return the exit code."""
        run = self.train()
        is_stopped = run.summary["stopped"]
        if self.rank_place is not None and self.rank_place.rank > 0:
            # srun --kill-on-bad-exit would end rank 0 before its request to requeue the job.
            if is_stopped and not self.requeue:
                return EXIT_STOPPED
            if run.has_failed and not is_stopped:
                return EXIT_FAILED
            return EXIT_DONE
        self.result({**run.summary, "run": str(run.folder)}, *run.lines())
        if is_stopped:
            if self.requeue:
                requeue_after(run.stop_signal)
            return EXIT_STOPPED
        run.require_finite_steps()
        return EXIT_DONE

    def _rank_arguments(self, plan: RunPlan) -> tuple[Any, ...]:
        options = options_of(RunOptions, self, quiet=self.json)
        return plan.recipe, options, plan.folder, plan.checkpoint, plan.step, plan.accept_changes

    def _launch(self, plan: RunPlan) -> LaunchResult:
        folder = plan.folder
        first_step = plan.step
        checkpoints = CheckpointFolder(folder / "checkpoints")
        held = HeldFolder(folder)
        processes = self.process_range(plan.recipe)

        def attempt(count: int, config: LaunchConfig) -> LaunchResult:
            arguments = self._rank_arguments(plan)
            if sys.stderr.isatty() and not self.json:
                logger.info("starting %s", plural(count, "process"))
            return self.launch("train", *arguments, processes=count, config=config)

        def newest_step() -> int:
            nonlocal plan
            held.require_in_place()  # not another run that has taken the path
            checkpoint = checkpoints.newest_valid()
            step = 0
            if checkpoint is not None:
                step = step_of(checkpoint)
            plan = replace(plan, checkpoint=checkpoint, step=step)
            return step

        try:
            return self.launch_with_restarts(
                processes,
                attempt,
                log_dir=folder / "logs",
                first_step=first_step,
                newest_step=newest_step,
            )
        except RankError as error:
            if error.failure.code == E_DISK_HANG:  # to read the folder could take without end
                raise
            hint = ""
            if checkpoints.steps():
                hint = f"after the fix, resume with: {_command('resume', folder)}"
            raise error.with_next_step(hint) from None


class SchemaAction(argparse.Action):
    """Print the JSON schema of recipes, and end the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=settings["help"])

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        """Print the schema."""
        sys.stdout.write(recipe_schema())
        parser.exit()


@dataclass(frozen=True, kw_only=True)
class Train(TrainingOptions, BatchOptions, RecipeOptions):
    """Train a recipe on any number of processes.

    The result is the same: to rounding, or with --exact to the bit.
    """

    example: ClassVar = "samestep train digits epochs=5 --processes 2 --name first"
    usual: ClassVar = (
        *("processes", "name", "exact", "print", "or_resume", "device", "strategy"),
        *("per_device_batch_size", "max_restarts", "json"),
    )
    group: ClassVar = "output"

    name: str | None = option("name of the run (default: recipe, date and time)")
    exact: bool = option(
        "the same bits on every number of processes: step.reduction=exact", default=False
    )
    or_resume: bool = option("resume the run of this --name if it exists", default=False)
    runs: Path = option("folder of runs", "DIR", default=Path("runs"))
    schema: bool = option(
        "print the JSON schema of recipes, for editors", action=SchemaAction, default=False
    )
    print: bool = option(
        "print the complete recipe, with all defaults; train nothing", default=False
    )

    def run(self) -> int:
        """Train, or print the recipe."""
        if not self.print:
            return super().run()
        from samestep.recipes.yaml_text import to_yaml  # a package of the extra `recipes`

        overrides = self.batch_overrides(self._settings, self.size)
        data = recipe_data(load_recipe(self.recipe, overrides).with_microbatches())
        self.result({"recipe": data}, to_yaml(data).rstrip())
        return EXIT_DONE

    @property
    def _settings(self) -> list[str]:
        exact = ["step.reduction=exact"] if self.exact else []
        return [*self.strategy_overrides(), *exact, *self.overrides]

    def train(self) -> TrainedRun:
        """Train, and remove the directory after invalid input, so that the name is free."""
        if self.or_resume and not self.name:
            raise option_conflict("--or-resume without --name", "--name NAME")
        try:
            return super().train()
        except KeyboardInterrupt:
            self._new_folder.remove_without_checkpoint()
            raise
        except SamestepError as error:
            if error.exit_code in (InputError.exit_code, EXIT_STOPPED) or error.code == "E_OUTPUT":
                self._new_folder.remove_without_checkpoint()
            raise

    def make_plan(self, restarts: int) -> RunPlan:
        """Create the run; with `--or-resume`, or after a restart, resume the run of this name."""
        overrides = self._settings
        if self.name is not None:
            require_run_name(self.name, "--name first, or --runs DIR for another folder")
            folder = self.runs / self.name
            # A job that its launcher restarts runs the same command again.
            if (restarts or self.or_resume) and folder.exists():
                trusted = load_recipe(self.recipe, overrides)
                plan = plan_to_resume(folder, overrides, trust=trusted)
                if not restarts:
                    require_recipe_of_run(trusted, plan.recipe, folder)
                return plan
        recipe = load_recipe(self.recipe, self.batch_overrides(overrides, self.size))
        recipe = recipe.with_microbatches()
        require_paths(recipe)
        if self.per_device_batch_size is not None:
            require_microbatches(recipe.microbatch_count, int(self.size))
        # Not earlier: another command could take the same time as its name meanwhile.
        folder = self.runs / (self.name or timed_name(self.runs, Path(self.recipe).stem))
        self._new_folder.create(folder)
        write_recipe(recipe, folder / "recipe.yaml")
        remember(folder, recipe)  # this user wrote the recipe: a resumption needs no --trust
        return RunPlan(recipe, folder)

    @cached_property
    def _new_folder(self) -> _NewFolder:
        return _NewFolder()


class _NewFolder:
    """Directory that this process has created for a new run."""

    def __init__(self) -> None:
        self._held: HeldFolder | None = None
        self._creates_runs = False

    def create(self, folder: Path) -> None:
        self._creates_runs = not folder.parent.exists()
        value = f"the run {folder} cannot be created"
        with output_errors(value, "a writable folder", "--runs DIR"):
            try:
                folder.mkdir(parents=True)
            except FileExistsError as error:
                value = f"the run {folder} exists"
                fix = f"--name with another name, or {_command('resume', folder)}"
                raise InputError(value, "the name of a new run", fix, code="E_OUTPUT") from error
        self._held = HeldFolder(folder)

    def remove_without_checkpoint(self) -> None:
        # Another run can have the path by now.
        if self._held is None or not self._held.is_in_place():
            return
        path = self._held.path
        if not (path / "checkpoints").exists():
            shutil.rmtree(path)
            if self._creates_runs and not any(path.parent.iterdir()):
                path.parent.rmdir()


@dataclass(frozen=True, kw_only=True)
class Resume(TrainingOptions, SetOption, RunArgument):
    """Resume a run from a checkpoint, on any number of processes, with the same result."""

    example: ClassVar = "samestep resume first epochs=20 --processes 3"
    usual: ClassVar = (
        *("checkpoint", "processes", "device", "strategy"),
        *("max_restarts", "json"),
    )

    checkpoint: str = option("best, last, epoch-N, or a step", "WHICH", default="last")
    accept_changes: bool = option(
        "continue although the data or the user's Python modules have changed", default=False
    )

    def make_plan(self, restarts: int) -> RunPlan:
        """Return the plan from the checkpoint; after a restart, from the newest one."""
        overrides = [*self.strategy_overrides(), *self.overrides]
        folder = self.folder
        is_new = not CheckpointFolder(folder / "checkpoints").steps()
        # A run without checkpoints starts from the beginning, which is no checkpoint by name.
        if (restarts or is_new) and self.checkpoint == "last":
            plan = plan_to_resume(folder, overrides, trust=self.trust)
        else:
            plan = plan_from_checkpoint(folder, self.checkpoint, overrides, trust=self.trust)
        accepts = self.accept_changes and not restarts
        return replace(plan, recipe=plan.recipe.with_microbatches(), accept_changes=accepts)


def train(
    recipe: str | Path, overrides: Mapping[str, Any] | None = None, **options: Any
) -> RunResult:
    """Train a recipe as `samestep train` does, and return the result of the run.

        overrides = {"data.options.path": "photos", "epochs": 5}
        samestep.train("images", overrides, processes=2, name="first")

    Ranks are new processes, so a script calls this below `if __name__ == "__main__":`. In a script
    that torchrun or srun has started, this process is a rank.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: values of keys of the recipe, numbers, text, booleans, None, lists
            and mappings.
        options: options of `samestep train` by their names, such as `processes`, `name`, `exact`,
            `strategy`, `or_resume`, `runs` and `max_restarts`. Times are seconds.

    Returns:
        Metrics, the best of them, and the directory of the run.

    Raises:
        InputError: the recipe, a key or an option is invalid.
        RankError: a rank failed; the run can be resumed if it has a checkpoint.
        NonFiniteError: most steps were skipped.
    """
    end_unguarded_import()
    known = {entry.name for entry in fields(Train) if entry.metadata}
    known -= {"recipe", "overrides", "json", "print", "schema"}
    for name in options:
        if name not in known:
            raise InputError(
                f"samestep.train has no option {name}",
                expected=f"options of samestep train: {', '.join(sorted(known))}",
                fix="keys of the recipe belong into the second argument: "
                "samestep.train(recipe, {key: value})",
                code="E_UNKNOWN_OPTION",
            )
    # The options are typed as those of the command line, where numbers can also be ranges.
    if "processes" in options:
        options["processes"] = str(options["processes"])
    if "runs" in options:
        options["runs"] = Path(options["runs"])
    # JSON is read as YAML; `str` is for paths.
    texts = [f"{key}={json.dumps(value, default=str)}" for key, value in (overrides or {}).items()]
    try:
        run = Train(recipe=str(recipe), overrides=texts, **options).train()
    except ReportedError as error:
        raise SystemExit(error.exit_code) from None
    run.require_finite_steps()
    return RunResult.of(run.folder, run.summary)
