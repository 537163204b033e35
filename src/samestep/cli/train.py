"""`samestep train`: training of a recipe on any number of processes, also for `samestep resume`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.cli.external_launcher import run_as_rank
from samestep.cli.launch_options import launch_ranks, launch_with_restarts, requeue_after, slurm_restarts
from samestep.cli.new_run import NewRun, TrainingOptions, add_training_options
from samestep.cli.options import add_options, add_recipe_argument, option_conflict, print_json
from samestep.cli.run_plans import RunPlan
from samestep.distributed.disk_operations import HeldFolder
from samestep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    InputError,
    NonFiniteError,
    SamestepError,
    WitnessError,
)
from samestep.launcher.failure import E_DISK_HANG, RankError
from samestep.launcher.launch import LaunchConfig, LaunchResult
from samestep.loggers.logger import format_metric
from samestep.loggers.trackers import tensorboard_command
from samestep.recipes.recipe_files import make_saved_recipe, with_saved_weight
from samestep.units import plural


def add_train(add_parser: Any) -> None:
    """Add `samestep train`."""
    parser = add_parser(
        description="Train a recipe on any number of processes, with the same result.",
        epilog="example: samestep train digits --processes 2 --set epochs=5 --name first",
    )
    add_recipe_argument(parser)
    add_options(parser, "--per-device-batch-size", "--accumulate")
    add_training_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--name", help="name of the run (default: recipe, date and time)")
    group.add_argument("--or-resume", action="store_true", help="resume the run of this --name if it exists")
    add_options(group, "--runs")
    add_options(parser, "--json")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    """Train; return 0 after all epochs, 130 after a request to stop."""
    options = TrainingOptions.parse(arguments)
    if arguments.or_resume and not arguments.name:
        raise option_conflict("--or-resume without --name", "the name of the run", "--name NAME")
    batch = (arguments.per_device_batch_size, arguments.accumulate)
    new_run = NewRun(arguments.recipe, arguments.name, arguments.runs, *batch, or_resume=arguments.or_resume)
    try:
        return run_training(options, partial(new_run.plan, options))
    except KeyboardInterrupt:
        new_run.remove_without_checkpoint()
        raise
    except SamestepError as error:
        if error.exit_code in (InputError.exit_code, EXIT_STOPPED) or error.code == "E_OUTPUT":
            new_run.remove_without_checkpoint()
        raise


def run_training(options: TrainingOptions, make_plan: Callable[[int], RunPlan]) -> int:
    """Train with the plan for a number of restarts by a launcher or by Slurm; return the exit code."""
    rendezvous = options.launch.rendezvous
    if rendezvous is None:
        return _launch(options, make_plan(slurm_restarts(options.launch.requeue)))

    def rank_arguments(plan: RunPlan) -> tuple[Any, ...]:
        return plan.recipe, options.run, plan.folder, plan.checkpoint, plan.step, plan.accept_changes

    plan, summary = run_as_rank(options.launch, rendezvous, "train", make_plan, rank_arguments)
    if rendezvous.rank == 0:
        return _finish(options, summary, plan.folder)
    if summary["stopped"]:
        # srun --kill-on-bad-exit would end rank 0 before its request to requeue the job.
        return EXIT_DONE if options.launch.requeue else EXIT_STOPPED
    return EXIT_FAILED if summary["has_failed"] else EXIT_DONE


def _launch(options: TrainingOptions, plan: RunPlan) -> int:
    folder, recipe, start = plan.folder, plan.recipe, (plan.checkpoint, plan.step, plan.accept_changes)
    held = HeldFolder(folder)
    processes = options.launch.process_range(plan.recipe)

    def attempt(count: int, launch_config: LaunchConfig) -> LaunchResult:
        arguments = (recipe, options.run, folder, *start)
        return launch_ranks("train", *arguments, processes=count, launch_config=launch_config, options=options.launch)

    def newest_step() -> int:
        nonlocal recipe, start
        held.require_in_place()
        checkpoint = CheckpointFolder(folder / "checkpoints").newest_valid()
        start = (checkpoint, _step_of(checkpoint) if checkpoint else 0, False)
        if checkpoint is not None:
            saved = make_saved_recipe(read_state(checkpoint).progress.recipe, origin=str(checkpoint))
            recipe = with_saved_weight(recipe, saved)
        return start[1]

    try:
        result = launch_with_restarts(
            options.launch, processes, attempt, log_dir=folder / "logs", first_step=plan.step, newest_step=newest_step
        )
    except RankError as error:
        # To read the folder could take without end; and the newest checkpoint can contain wrong values.
        if error.failure.code in (E_DISK_HANG, WitnessError.default_code):
            raise
        steps = CheckpointFolder(folder / "checkpoints").steps()
        command = _command("resume", folder)
        hint = f"after the fix, resume after step {_step_of(steps[-1])} with: {command}" if steps else ""
        raise error.with_next_step(hint) from None
    return _finish(options, result.value, folder, stop_signal=result.stop_signal)


def _command(name: str, folder: Path) -> str:
    return shlex.join(["samestep", name, str(folder)])


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("step-")[2])  # also `.replaced-step-N`


def _finish(options: TrainingOptions, summary: dict[str, Any], folder: Path, *, stop_signal: int | None = None) -> int:
    """Print the summary, requeue the Slurm job if requested, and return the exit code."""
    own_signal, has_failed = summary.pop("stop_signal"), summary.pop("has_failed")
    if options.run.quiet:
        print_json({**summary, "run": str(folder)})
    else:
        _print_summary(summary, folder)
    if not summary["stopped"]:
        if has_failed:
            raise NonFiniteError(
                f"the run skipped {_skipped_steps(summary)}",
                expected="most steps update the weights",
                fix="lower the learning rate, set step.clip_norm, or find the first such step with "
                "step.non_finite=stop, in a new run",
            )
        return EXIT_DONE
    if options.launch.requeue:
        requeue_after(stop_signal or own_signal)
    return EXIT_STOPPED


def _skipped_steps(summary: dict[str, Any]) -> str:
    return f"{summary['skipped_steps']} of {plural(summary['step'], 'step')}, because loss or gradient was not finite"


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    evaluation = summary["evaluation"]
    values = {name: value for name, value in evaluation.items() if name not in ("loss", "samples")}
    lines = [(name, format_metric(name, value)) for name, value in values.items()]
    if evaluation:
        lines.append(("evaluated", f"{evaluation['samples']:,} samples"))
    if summary["samples_per_second"]:
        lines.append(("speed", f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s in all"))
    if summary["skipped_steps"]:
        lines.append(("skipped", _skipped_steps(summary)))
    lines.append(("run", str(folder)))
    if summary["stopped"]:
        lines.append(("stopped", f"after step {summary['step']}; resume with: {_command('resume', folder)}"))
    else:
        if (folder / "tensorboard").exists():
            lines.append(("curves", tensorboard_command(folder / "tensorboard")))
        lines.append(("evaluate", _command("eval", folder)))
    width = max(12, *(len(name) + 2 for name, _ in lines))
    print("\n".join(f"{name:<{width}}{text}" for name, text in lines))
