"""`samestep audit --against`: the command on another number of processes, and experiments that find a cause."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from samestep.errors import InputError
from samestep.tools.audit.comparison import Difference, Trace, first_difference
from samestep.tools.audit.events import read_events
from samestep.tools.audit.worlds import World, group_worlds
from samestep.tools.verify.causes import Cause

# Options of torchrun and of accelerate launch.
_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")
# Parts of a model that an experiment turns off, with the event that shows them.
_PARTS = {"dropout": "dropout", "batch norm": "batch_norm"}
_PART_CAUSES = {"dropout": Cause.MODEL_RANDOM.value, "batch norm": Cause.BATCH_NORM.value}

Run = Callable[[Sequence[str], Path, Sequence[str]], int]


@dataclass(frozen=True)
class ProgramComparison:
    """First difference of one program between two numbers of processes."""

    program: str
    processes: tuple[int, int]  # of the reference, of the command
    steps: int  # observed in both
    difference: Difference | None


def reference_command(command: Sequence[str], processes: int) -> list[str]:
    """Return the command with another number of processes.

    Raises:
        InputError: the command does not have exactly one option for the number of processes.
    """
    result, count = list(command), 0
    for i, argument in enumerate(command):
        option, _, value = argument.partition("=")
        if option in _OPTIONS:
            count += 1
            if value:
                result[i] = f"{option}={processes}"
            elif i + 1 < len(command):
                result[i + 1] = str(processes)
    if count != 1:
        raise InputError(
            f"--against {processes}: the command has {count} options for the number of processes",
            expected=f"exactly one of {', '.join(_OPTIONS)}",
            fix=f"--against-command '{shlex.join(command)}', with another number of processes",
            code="E_OPTION_CONFLICT",
        )
    return result


def compare_commands(
    reference: Sequence[str], command: Sequence[str], observed: Path, folder: Path, run: Run
) -> tuple[int, list[ProgramComparison]]:
    """Run the reference command, compare it with the observed one, and repeat both without parts of the model.

    Args:
        reference: command on the other number of processes.
        command: the audited command.
        observed: folder with the events of the audited command.
        folder: folder for the events of the further runs.
        run: function of command, folder and parts to turn off; returns the exit code.

    Returns:
        The exit code of the first command that failed, or 0, and a comparison for each program.
    """
    events = _new(folder / "reference")
    code = run(reference, events, ())
    if code:
        return code, []
    pairs = _pairs(_traces(events), _traces(observed))
    results = [_compare(*pair) for pair in pairs]
    parts = [part for part, kind in _PARTS.items() if any(trace.has(kind) for pair in pairs for trace in pair)]
    subsets = [subset for size in range(1, len(parts) + 1) for subset in combinations(parts, size)]
    for number, subset in enumerate(subsets):
        if not any(map(_needs_experiment, results)):
            break
        folders = [_new(folder / f"{name}-{number}") for name in ("reference", "command")]
        codes = [run(one, path, subset) for one, path in zip((reference, command), folders, strict=True)]
        if not any(codes):
            changed = [_compare(*pair) for pair in _pairs(*map(_traces, folders))]
            results = [_attributed(*pair, subset) for pair in zip(results, changed, strict=True)]
    return 0, results


def comparisons_as_json(comparisons: Sequence[ProgramComparison]) -> list[dict[str, object]]:
    """Return the comparisons for `--json`."""
    return [asdict(comparison) for comparison in comparisons]


def print_comparisons(comparisons: Sequence[ProgramComparison]) -> None:
    """Print the first difference of each program."""
    for one in comparisons:
        runs = f"{one.program}, {one.processes[0]} and {one.processes[1]} processes"
        if one.difference is None:
            print(f"{runs}: equal to rounding in {one.steps} observed steps")
            continue
        print(f"{runs}: the first difference is in the {one.difference.quantity} of step {one.difference.step}")
        print(f"    cause: {one.difference.cause}")
        for text in one.difference.evidence:
            print(f"    {text}")


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _traces(folder: Path) -> list[Trace]:
    """Return the trainings of a command, in the order of their programs."""
    worlds = [world for world in group_worlds(read_events(folder)) if _trains(world)]
    return [Trace.of(world) for world in sorted(worlds, key=lambda world: world.program)]


def _trains(world: World) -> bool:
    return bool(world.events("update")[0])


def _pairs(references: list[Trace], others: list[Trace]) -> list[tuple[Trace, Trace]]:
    programs = [[trace.world.program for trace in traces] for traces in (references, others)]
    if programs[0] != programs[1]:
        raise InputError(
            f"trainings of {programs[0]} on the other number of processes, and of {programs[1]}",
            expected="the same trainings by both commands",
            fix="audit a command with one training, of which all ranks run on this machine",
            code="E_NOTHING_OBSERVED",
        )
    return list(zip(references, others, strict=True))


def _compare(reference: Trace, other: Trace) -> ProgramComparison:
    sizes = (reference.world.size, other.world.size)
    steps = len(reference.updates.keys() & other.updates.keys())
    return ProgramComparison(other.world.program, sizes, steps, first_difference(reference, other))


def _needs_experiment(comparison: ProgramComparison) -> bool:
    difference = comparison.difference
    return difference is not None and difference.cause == Cause.UNKNOWN.value


def _attributed(before: ProgramComparison, after: ProgramComparison, parts: Sequence[str]) -> ProgramComparison:
    """Return the comparison with its cause, if the difference disappears without parts of the model."""
    if before.difference is None or not _needs_experiment(before):
        return before
    remaining = after.difference
    if remaining is not None and remaining.order_key <= before.difference.order_key:
        return before
    end = (
        "nothing differs"
        if remaining is None
        else f"first difference in the {remaining.quantity} of step {remaining.step}"
    )
    text = f"both run again without {' and '.join(parts)}: {end}"
    cause = ", ".join(_PART_CAUSES[part] for part in parts)
    return replace(
        before, difference=replace(before.difference, cause=cause, evidence=[*before.difference.evidence, text])
    )
