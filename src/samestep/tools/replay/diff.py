"""First difference of two runs, or of a run and its log: recipes, checksums, and tensors of replayed steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.errors import InputError
from samestep.recipes.recipe_files import differences, make_recipe
from samestep.runs import LOOP
from samestep.tools.replay.launch import Replayed, ReplayOptions, Subject, replay
from samestep.tools.report.run import Run
from samestep.units import plural

# Keys of a recipe on which no step depends; nor does one depend on exact strategies.
_FREE = ("metrics", "best_by", "best_mode")
# Entries of `environment.json` that belong to one start.
_OF_START = (
    "started",
    "from_step",
    "sources",
    "remark",
    "script",
    "directory",
    "started_as",
    "keep",
)


@dataclass(frozen=True)
class Comparison:
    """Logs of two runs."""

    recipe: list[str]  # differences of the recipes that change the mathematics, one line per key
    other_keys: list[str]  # differences of other keys of the recipes
    environment: list[str]  # differences of the last starts, one line per key
    last_equal: int  # last step with equal checksums; 0 for none
    first_different: int | None  # first step with different checksums
    compared: int  # number of steps with checksums of both runs


def compare_logs(one: Run, other: Run) -> Comparison:
    """Compare recipes, environments and checksums of two runs.

    Raises:
        InputError: the runs have no checksums of the same steps, although their recipes have the
        same mathematics.
    """
    lines = differences(one.recipe, other.recipe)
    keys = (
        (*_FREE, "strategy") if _has_exact_strategy(one) and _has_exact_strategy(other) else _FREE
    )
    free = [line for line in lines if line.partition(":")[0].partition(".")[0] in keys]
    recipe = [line for line in lines if line not in free]
    checksums = one.events.checksums
    others = other.events.checksums
    common = sorted(checksums.keys() & others.keys())
    if not common and not recipe:
        raise no_checksum(f"{one.folder} and {other.folder} have no checksums of the same steps")
    first = next((step for step in common if checksums[step] != others[step]), None)
    equal = max((step for step in common if first is None or step < first), default=0)
    environment = differences(_environment(one), _environment(other))
    return Comparison(recipe, free, environment, equal, first, len(common))


def _has_exact_strategy(run: Run) -> bool:
    """Return whether the strategy of a run can give the bits of one process; that of a script is not known."""
    if (run.folder / LOOP).is_file():
        return True
    recipe = make_recipe(run.recipe, (), origin=str(run.folder / "recipe.yaml"))
    return recipe.strategy.is_exact(recipe.step.tensor_slices) and recipe.step.reduction == "exact"


def no_checksum(problem: str) -> InputError:
    """Return the error of a run without the checksums that a comparison needs."""
    fix = "train with --checksum-every 1"
    return InputError(
        problem, "runs of this version, with --checksum-every above 0", fix, code="E_NO_CHECKSUM"
    )


def _environment(run: Run) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    sources = start.get("sources")
    entry = {key: value for key, value in start.items() if key not in _OF_START}
    return entry | ({"modules": dict(sources)} if isinstance(sources, dict) else {})


@dataclass(frozen=True)
class Finding:
    """First difference in replays."""

    text: str  # its location, or the result of the replays
    tensor: str | None = None  # name of the tensor, if known
    step: int | None = None  # its step, for a difference between the replays


Replays = tuple[list[Replayed], Finding | None]


def replay_and_compare(
    subjects: Sequence[Subject], last: int, options: ReplayOptions, progress: Callable[[str], None]
) -> Replays:
    """Compute one or two runs again up to step `last`, and compare them with their logs and with one another.

    `progress` gets a text before each replay.
    """
    replays = []
    for subject in subjects:
        processes = plural(subject.processes, "process")
        progress(f"replaying {subject.folder} up to step {last} on {processes}")
        replays.append(replay(subject, last, options))
    if len(replays) == 2:
        names = replays[0].by_name
        others = replays[1].by_name
        tensor = next(
            (name for name in {**names, **others} if names.get(name) != others.get(name)), None
        )
        if tensor is not None:
            return replays, Finding(f"step {last}, state after the step: {tensor}", tensor, last)
    return replays, _compare_with_logs(replays)


def _compare_with_logs(replays: Sequence[Replayed]) -> Finding | None:
    """Return the finding of replays that do not differ from one another."""
    texts = [
        f"{replayed.run} is not reproduced: step {replayed.first_different} of its log has another checksum"
        for replayed in replays
        if replayed.first_different is not None
    ]
    equal = ["the replays of both runs are equal"] if len(replays) == 2 else []
    if texts:
        return Finding("; ".join([*equal, *texts]))
    return None
