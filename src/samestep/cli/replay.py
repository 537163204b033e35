"""`samestep replay`: steps of a run computed again, and compared with its checksums."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.cli.commands import PRELOAD
from samestep.cli.external_launcher import require_single_process
from samestep.cli.launch_options import LaunchOptions
from samestep.cli.options import (
    add_number,
    add_options,
    add_run_argument,
    option_conflict,
    print_json,
    progress,
    require_absent,
)
from samestep.cli.recipe_options import add_strategy_options, all_overrides
from samestep.cli.run_plans import plan_to_replay, reading
from samestep.config import resolve_mesh
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, InputError
from samestep.runs import LOOP
from samestep.units import plural

if TYPE_CHECKING:
    from samestep.tools.replay.launch import ReplayOptions, ScriptCommand, Subject
    from samestep.tools.report.run import Run


def add_replay(add_parser: Any) -> None:
    """Add `samestep replay`."""
    parser = add_parser(
        description="Compute a run again from a checkpoint, or from the beginning, up to a step, and compare "
        "the checksums of the state with those of the run. The run is only read.",
        epilog="example: samestep replay runs/first --step 120 --processes 2. "
        "Exit codes: 0 equal, 1 failed run, 2 invalid input, 3 different.",
    )
    add_run_argument(parser)
    add_number(parser, "--step", required=True, metavar="N", help="last step")
    text = "compute from the beginning, not from the nearest checkpoint before the last checksum up to step N"
    parser.add_argument("--from-start", action="store_true", help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a checkpoint of the state after step N to DIR")
    add_replay_options(parser)
    add_options(parser.add_argument_group("recipe"), "--set")
    add_strategy_options(parser)
    add_options(parser, "--json")
    parser.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    """Replay and print; return 0 if all checksums are equal to the logged ones, otherwise 3."""
    from samestep.tools.replay.diff import no_checksum
    from samestep.tools.replay.launch import ScriptCommand, run_replay
    from samestep.tools.report.run import read_runs

    require_single_process("replay")
    (run,), step = read_runs([arguments.folder]), arguments.step
    last_logged = max((number for number in run.events.checksums if number <= step), default=0)
    subject = subject_of(run, last_logged - 1, step, arguments, all_overrides(arguments))
    _require_checksum(run, step)
    is_script = isinstance(subject.command, ScriptCommand)
    if arguments.out is not None:
        if is_script:
            raise _script_error(
                f"--out with the run of a script, {run.folder}", "--json has the checksum of each tensor"
            )
        require_absent(arguments.out)
    is_chosen = is_script and not arguments.from_start
    origin = "its newest checkpoint before a checksum" if is_chosen else f"step {max(subject.first, 0)}"
    processes = plural(subject.processes, "process")
    progress(arguments)(f"replaying {run.folder} up to step {step} from {origin} on {processes}")
    with reading(subject.checkpoint):
        result = run_replay(subject, step, replay_options(arguments), out=arguments.out)
    compared = {number: value for number, value in result.checksums.items() if number in subject.checksums}
    if not compared:  # a script that loads its own checkpoint
        raise no_checksum(f"{run.folder} has no checksum of the steps from {result.first} to {step}")
    wrong = next((number for number, value in compared.items() if value != subject.checksums[number]), None)
    if arguments.json:
        data = {"run": str(run.folder), "from_step": result.first, "step": step, "processes": subject.processes}
        data |= {"checksum": result.checksums[step], "logged": subject.checksums.get(step)}
        data |= {"compared": len(compared), "first_different": wrong, "equal": wrong is None}
        print_json({**data, "tensors": result.by_name})
    else:
        is_logged = "" if step in compared else " (not logged)"
        print(f"{'replayed':<12}steps {result.first + 1} to {step} on {plural(subject.processes, 'process')}")
        print(f"{'checksum':<12}{result.checksums[step]} after step {step}{is_logged}")
        equality = "equal to the log" if wrong is None else f"different from the log from step {wrong} on"
        print(f"{'compared':<12}{plural(len(compared), 'checksum')}: {equality}")
        if arguments.out is not None:
            print(f"{'written':<12}{arguments.out / f'step-{step:09d}'}")
    return EXIT_DONE if wrong is None else EXIT_DIFFERS


def _require_checksum(run: Run, step: int) -> None:
    """Raise an `InputError` if a run has fewer steps, or no checksum up to this step."""
    from samestep.tools.replay.diff import no_checksum

    if run.state == "finished" and step > run.events.step:
        raise InputError(
            f"step {step} of {run.folder}, which has {plural(run.events.step, 'step')}",
            expected="a step of the run",
            fix=f"--step {run.events.step} or less",
            code="E_VALUE",
        )
    first = min(run.events.checksums, default=None)
    if first is None or first > step:
        problem = f"{run.folder} has no checksum up to step {step}"
        raise no_checksum(problem if first is None else f"{problem}; the first one is that of step {first}")


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a replay: those of the machine, and of the code of the run."""
    group = parser.add_argument_group("machine (results do not depend on these options)")
    text = "number of ranks (default: as in the run)"
    group.add_argument("--processes", metavar="N", help=text)
    add_options(group, "--devices", "--share-gpu", "--device")
    group = parser.add_argument_group("code of the run")
    add_options(group, "--trust")
    text = "replay although the user's Python modules have changed since the last start of the run"
    group.add_argument("--accept-changes", action="store_true", help=text)


def subject_of(run: Run, begin: int, last: int, arguments: argparse.Namespace, overrides: list[str]) -> Subject:
    """Return a run to compute from a checkpoint at or before `begin`, on the ranks of step `last` unless set.

    Raises:
        InputError: the ranks do not fit the recipe, or the run is that of a script that cannot be started again.
    """
    from samestep.tools.replay.launch import Subject

    if (run.folder / LOOP).is_file():
        command = _script_command(run, last, arguments, overrides)
        processes = _recorded_processes(run.starts, last)
        if arguments.processes is not None or arguments.devices:
            processes = LaunchOptions.parse(arguments).process_range()[1]
        first = -1 if arguments.from_start else begin
        return Subject(run.folder, command, None, first, processes, run.events.checksums)
    plan = plan_to_replay(run.folder, begin, overrides, trust=arguments.trust, from_start=arguments.from_start)
    if arguments.processes is not None or arguments.devices:
        processes = LaunchOptions.parse(arguments).process_range(plan.recipe)[1]
    else:
        processes = _recorded_processes(run.starts, last)
        resolve_mesh(plan.recipe.strategy, processes, plan.recipe.microbatch_count, plan.recipe.batch_size)
    return Subject(run.folder, plan.recipe, plan.checkpoint, plan.step, processes, run.events.checksums)


def _script_command(run: Run, last: int, arguments: argparse.Namespace, overrides: list[str]) -> ScriptCommand:
    """Return the command of the start that computed a step.

    Raises:
        InputError: the command is not trusted, is not known, or cannot be started again.
    """
    from samestep.tools.replay.launch import ScriptCommand

    chosen = {"--set": overrides, "--device": arguments.device != "auto"}
    option = next((option for option, is_set in chosen.items() if is_set), None)
    if option is not None:
        raise option_conflict(
            f"{option} with the run of a script", "options that the script does not set", "leave it out"
        )
    start = _start_of(run.starts, last)
    script, values, folder = (start.get(key) for key in ("script", "arguments", "directory"))
    if start.get("started_as") == "function":
        raise _script_error(f"{run.folder} is the run of a function that samestep.launch called")
    if not (isinstance(script, str) and isinstance(folder, str) and isinstance(values, list)):
        raise _script_error(f"{run.folder} has no command in environment.json")
    path, directory = Path(script), Path(folder)
    if not (directory / path).is_file():
        raise _script_error(f"{directory / path}, the script of {run.folder}, is not a file")
    if not arguments.trust:
        raise InputError(
            f"{run.folder} is the run of a script, {directory / path}",
            expected="--trust: a replay executes the script that the run directory names",
            fix="read the script, then repeat the command with --trust",
            code="E_UNTRUSTED",
        )
    return ScriptCommand(path, tuple(map(str, values)), directory)


def _script_error(
    value: str, fix: str = "samestep verify SCRIPT -- ARGUMENTS computes and compares steps"
) -> InputError:
    expected = "the run of a script that `samestep run SCRIPT`, python or torchrun started, with its file in place"
    return InputError(value, expected, fix, code="E_SCRIPT")


def _start_of(starts: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    """Return the start that computed a step; empty if none is known."""
    return next((start for start in reversed(starts) if _first_step(start) < step), {})


def _recorded_processes(starts: Sequence[Mapping[str, Any]], step: int) -> int:
    """Return the number of ranks of the start that computed a step."""
    count = _start_of(starts, step).get("processes")
    return count if isinstance(count, int) and count > 0 else 1


def _first_step(start: Mapping[str, Any]) -> int:
    step = start.get("from_step")
    return step if isinstance(step, int) else 0


def replay_options(arguments: argparse.Namespace) -> ReplayOptions:
    """Return the options of a replay among the arguments of a command."""
    from samestep.tools.replay.launch import ReplayOptions

    return ReplayOptions(
        device=arguments.device,
        accept_changes=arguments.accept_changes,
        quiet=arguments.json,
        preload=PRELOAD,
        environment=LaunchOptions.parse(arguments).environment,
    )
