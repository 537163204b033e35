"""`samestep diff`: first difference of two runs, or of a run and its log, also by replays.

Recipes and logged checksums are compared, and tensors of steps that are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config import DeviceKind, Recipe
from samestep.errors import InputError
from samestep.recipes.recipe_files import differences, make_recipe
from samestep.runs import LOOP
from samestep.tools.launch import run_on_ranks
from samestep.tools.run_log import Run
from samestep.units import plural

# Keys of a recipe on which no step depends; nor does one depend on exact strategies.
_FREE = ("metrics", "best_by", "best_mode")
# Entries of `environment.json` that belong to one start.
_OF_START = (
    *("started", "from_step", "sources", "remark", "batch_size"),
    *("script", "directory", "started_as", "keep"),
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


@dataclass(frozen=True)
class Subject:
    """One run to compute again."""

    folder: Path  # directory of the run, which is only read
    recipe: Recipe
    checkpoint: Path | None  # to start from; None for the beginning
    processes: int
    checksums: Mapping[int, str]  # logged checksums in hexadecimal digits, by step


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of replays."""

    device: DeviceKind = "auto"
    accept_changes: bool = False  # the user's code may differ from that of the last start
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass
class Replayed:
    """Result of a replay."""

    run: str
    processes: int
    first: int = 0  # step of the checkpoint, 0 for the beginning
    checksums: dict[int, str] = field(default_factory=dict)  # of logged steps and the last one
    by_name: dict[str, str] = field(default_factory=dict)  # checksum of each part of the last state
    compared: int = 0  # number of steps with a logged checksum
    first_different: int | None = None  # first step whose logged checksum is another one


@dataclass(frozen=True)
class Finding:
    """First difference in replays."""

    text: str  # its location, or the result of the replays
    tensor: str | None = None  # name of the tensor, if known
    step: int | None = None  # its step, for a difference between the replays


Replays = tuple[list[Replayed], Finding | None]


def compare_logs(one: Run, other: Run) -> Comparison:
    """Compare recipes, environments and checksums of two runs.

    Raises:
        InputError: the runs have no checksums of the same steps, although their recipes have the
            same mathematics.
    """
    lines = differences(one.recipe, other.recipe)
    free_keys: tuple[str, ...] = _FREE
    if _has_exact_strategy(one) and _has_exact_strategy(other):
        free_keys = (*_FREE, "strategy")
    free = [line for line in lines if line.partition(":")[0].partition(".")[0] in free_keys]
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
    """Return whether a strategy can give the bits of one process; that of a script is not known."""
    if (run.folder / LOOP).is_file():
        return True
    recipe = make_recipe(run.recipe, (), origin=str(run.folder / "recipe.yaml"))
    return recipe.strategy.is_exact(recipe.step.tensor_slices) and recipe.step.reduction == "exact"


def _environment(run: Run) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    entry = {key: value for key, value in start.items() if key not in _OF_START}
    if isinstance(start.get("sources"), dict):
        entry["modules"] = dict(start["sources"])
    return entry


def no_checksum(problem: str) -> InputError:
    """Return the error of a run without the checksums that a comparison needs."""
    return InputError(
        problem,
        expected="runs of this version, with --checksum-every above 0",
        fix="train with --checksum-every 1",
        code="E_NO_CHECKSUM",
    )


def replay_and_compare(
    subjects: Sequence[Subject], last: int, options: ReplayOptions, progress: Callable[[str], None]
) -> Replays:
    """Compute one or two runs again up to step `last`, and compare them and their logs.

    `progress` gets a text before each replay.

    Raises:
        StoppedError: a stop was requested.
    """
    replays: list[Replayed] = []
    for subject in subjects:
        processes = plural(subject.processes, "process")
        progress(f"replaying {subject.folder} up to step {last} on {processes}")
        replayed = run_on_ranks(
            "samestep.tools.diff_worker",
            "replay_recipe",
            *(subject, last, options),
            processes=subject.processes,
            preload=options.preload,
            environment=options.environment,
        )
        replays.append(replayed)
    texts = []
    if len(replays) == 2:
        names = replays[0].by_name
        others = replays[1].by_name
        for name in {**names, **others}:
            if names.get(name) != others.get(name):
                text = f"step {last}, state after the step: {name}"
                return replays, Finding(text, name, last)
        texts.append("the replays of both runs are equal")
    different = [replayed for replayed in replays if replayed.first_different is not None]
    if not different:
        return replays, None
    for replayed in different:
        log = f"step {replayed.first_different} of its log has another checksum"
        texts.append(f"{replayed.run} is not reproduced: {log}")
    return replays, Finding("; ".join(texts))
