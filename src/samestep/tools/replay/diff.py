"""First difference of two runs: recipes, environments, logged checksums, and the tensors of replayed steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.errors import InputError
from samestep.recipes.recipe_files import differences, make_recipe
from samestep.runs import LOOP
from samestep.tools.replay.launch import Replayed, ReplayOptions, ScriptCommand, Subject, run_replay
from samestep.tools.report.run import Run
from samestep.tools.verify.compare import compare
from samestep.tools.verify.trials import Record, Trial, read_record
from samestep.units import plural

# Keys of a recipe on which no step depends; nor does one depend on exact strategies.
_FREE = ("metrics", "best_by", "best_mode")
# Entries of `environment.json` that belong to one start.
_OF_START = ("started", "from_step", "sources", "remark", "script", "directory", "started_as", "keep")
_MAX_LISTED = 3  # names of the state in a text


@dataclass(frozen=True)
class Comparison:
    """Logs of two runs.

    Attributes:
        recipe: differences of the recipes that change the mathematics, one line per key.
        other_keys: differences of other keys of the recipes.
        environment: differences of the last starts, one line per key.
        last_equal: last step with equal checksums; 0 for none.
        first_different: first step with different checksums; None for none.
        compared: number of steps with checksums of both runs.
        only: by run, number of steps with a checksum beyond the last one of the other run.
    """

    recipe: list[str]
    other_keys: list[str]
    environment: list[str]
    last_equal: int
    first_different: int | None
    compared: int
    only: tuple[int, int]


def compare_logs(runs: Sequence[Run]) -> Comparison:
    """Compare recipes, environments and checksums of two runs.

    Raises:
        InputError: the runs have no checksums of the same steps, although their recipes have the same mathematics.
    """
    one, other = runs
    lines = differences(one.recipe, other.recipe)
    keys = (*_FREE, "strategy") if all(map(_has_exact_strategy, runs)) else _FREE
    free = [line for line in lines if line.partition(":")[0].partition(".")[0] in keys]
    recipe = [line for line in lines if line not in free]
    common = sorted(one.events.checksums.keys() & other.events.checksums.keys())
    if not common and not recipe:
        lacking = next((run for run in runs if not run.events.checksums), one)
        raise no_checksum(f"{lacking.folder} has no checksums of steps of the other run")
    first = next((step for step in common if one.events.checksums[step] != other.events.checksums[step]), None)
    equal = max((step for step in common if first is None or step < first), default=0)
    return Comparison(
        recipe,
        free,
        differences(_environment(one), _environment(other)),
        equal,
        first,
        len(common),
        (_beyond(one, other), _beyond(other, one)),
    )


def _has_exact_strategy(run: Run) -> bool:
    """Return whether the strategy of a run can give the bits of one process; that of a script is not known."""
    if (run.folder / LOOP).is_file():
        return True
    recipe = make_recipe(run.recipe, (), origin=str(run.folder / "recipe.yaml"))
    return recipe.strategy.is_exact(recipe.step.tensor_slices) and recipe.step.reduction == "exact"


def no_checksum(problem: str) -> InputError:
    """Return the error of a run without the checksums that a comparison needs."""
    return InputError(
        problem,
        expected="runs of this version, with --checksum-every above 0",
        fix="train with --checksum-every 1, a script with samestep.start(checksum_every=1); or compare the weights of "
        "checkpoints",
        code="E_NO_CHECKSUM",
    )


def _beyond(run: Run, other: Run) -> int:
    last = max(other.events.checksums, default=0)
    return sum(step > last for step in run.events.checksums)


def _environment(run: Run) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    sources = start.get("sources")
    entry = {key: value for key, value in start.items() if key not in _OF_START}
    return entry | ({"modules": dict(sources)} if isinstance(sources, dict) else {})


@dataclass(frozen=True)
class Finding:
    """First difference of two runs, from replays.

    Attributes:
        step: its step.
        text: its location, or the result of the replays.
        tensor: name of the tensor, if known.
        stage: stage of a step in the order of cause and effect, as in `samestep verify`; None without a difference
            between the replays.
        replays: one line per replay.
    """

    step: int
    text: str
    tensor: str | None = None
    stage: str | None = None
    replays: list[str] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def find_difference(
    subjects: Sequence[Subject], logs: Comparison, options: ReplayOptions, progress: Callable[[str], None]
) -> Finding:
    """Compute the steps between the last equal and the first different checksum again, and compare them.

    Args:
        subjects: the two runs.
        logs: comparison of the logs, with a different step.
        options: options of the replays.
        progress: called with a text before each replay.
    """
    assert logs.first_different is not None
    with TemporaryDirectory(prefix="samestep-diff-") as temporary:
        folder, lines = Path(temporary), list[str]()
        nearest = max(subjects, key=lambda subject: subject.first)
        checkpoint, start = nearest.checkpoint, nearest.first
        is_script = isinstance(nearest.command, ScriptCommand)  # which selects its checkpoint itself
        if start < logs.last_equal and not is_script:
            progress(_text(nearest, start, logs.last_equal))
            replayed = run_replay(nearest, logs.last_equal, options, out=folder / "checkpoints")
            wrong = _first_wrong(nearest, replayed.checksums)
            lines.append(_line(nearest, start, logs.last_equal, wrong))
            if wrong is not None:
                text = f"{nearest.folder}: a replay has other checksums than the log from step {wrong} on"
                return Finding(wrong, f"{text}, in steps in which the logs of both runs are equal", replays=lines)
            checkpoint, start = folder / "checkpoints" / "last", logs.last_equal
        records, replays = list[Record](), list[Replayed]()
        for number, subject in enumerate(subjects):
            progress(_text(subject, start, logs.first_different))
            place = folder / f"run-{number}"
            place.mkdir()
            after = logs.last_equal if is_script else 0
            trial = Trial(steps=None, device=options.device, folder=place, processes=subject.processes, after=after)
            own = Subject(subject.folder, subject.command, checkpoint, start, subject.processes, subject.checksums)
            replays.append(run_replay(own, logs.first_different, options, trial=trial))
            first = replays[-1].first
            lines.append(_line(subject, first, logs.first_different, _first_wrong(subject, replays[-1].checksums)))
            records.append(read_record(place, subject.processes))
        difference = compare(records[0], records[1], None).first
        if difference is not None:
            step = difference.step or logs.first_different
            return Finding(step, difference.location, difference.tensor, difference.stage, lines)
        return _without_location(subjects, replays, logs.first_different, lines)


def _without_location(subjects: Sequence[Subject], replays: Sequence[Replayed], step: int, lines: list[str]) -> Finding:
    """Return the finding of two replays with equal tensors in all stages of `samestep verify`."""
    names = [replayed.by_name for replayed in replays]
    differing = [name for name in {**names[0], **names[1]} if names[0].get(name) != names[1].get(name)]
    if differing:
        listed = ", ".join(differing[:_MAX_LISTED])
        return Finding(step, f"step {step}, state after the step: {listed}", differing[0], "after", lines)
    wrong = [
        (subject, replayed)
        for subject, replayed in zip(subjects, replays, strict=True)
        if replayed.checksums[step] != subject.checksums[step]
    ]
    texts, tensor = [], None
    for subject, replayed in wrong:
        if replayed.flipped is not None:
            tensor = replayed.flipped.rpartition(" of ")[2]
            texts.append(f"{subject.folder} had one flipped bit after step {step}: {replayed.flipped}")
        else:
            texts.append(f"{subject.folder} is not reproduced: step {step} of its log has another checksum")
    return Finding(step, "; ".join(["the replays of both runs are equal", *texts]), tensor, None, lines)


def _first_wrong(subject: Subject, checksums: Mapping[int, str]) -> int | None:
    return next((step for step, value in checksums.items() if subject.checksums.get(step, value) != value), None)


def _text(subject: Subject, start: int, last: int) -> str:
    return f"replaying {subject.folder} from step {max(start, 0)} to {last} on {plural(subject.processes, 'process')}"


def _line(subject: Subject, start: int, last: int, wrong: int | None) -> str:
    result = "has the logged checksums" if wrong is None else f"differs from the log from step {wrong} on"
    return f"{subject.folder}, steps {start + 1} to {last} on {plural(subject.processes, 'process')}: {result}"
