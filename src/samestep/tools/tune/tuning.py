"""All of `samestep tune`: memory, then workers and prefetch, then rules that would change bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from samestep.config import Recipe, RunOptions
from samestep.runtime.by_name import ByName
from samestep.runtime.launch import RankError, StoppedError, launch
from samestep.tools.timed import Spread
from samestep.tools.tune.choice import Place
from samestep.tools.tune.memory import Memory, examine
from samestep.tools.tune.rules import Rule, Tried, candidates
from samestep.tools.tune.search import Found
from samestep.tools.tune.setting import Setting

_TRIALS = "samestep.tools.tune.trials"


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is to be looked at, and for how long.

    Attributes:
        settings: the grid of workers and prefetch.
        rules: of those that change bits.
        memory: bytes that a rank may take, None for all that there is.
        seconds: of a turn.
        rounds: of each comparison of rules.
        preload: modules that all ranks need.
        environment: variables that they find.
    """

    settings: Sequence[Setting]
    rules: Sequence[str]
    memory: int | None
    seconds: float
    rounds: int
    options: RunOptions
    preload: tuple[str, ...]
    environment: Mapping[str, str] | None = None


@dataclass
class Tuning:
    """What was found of a recipe on a machine.

    Attributes:
        machine: as a benchmark describes it.
        found: of workers and prefetch; None where the shards do not fit into memory.
        absent: settings that could not be run, each with the reason.
        tried: rules that would change bits.
        seconds: that all of it took.
    """

    place: Place
    machine: dict[str, Any]
    memory: Memory
    found: Found | None = None
    absent: dict[Setting, str] = field(default_factory=dict)
    tried: list[Tried] = field(default_factory=list)
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        data = {
            "place": self.place.as_data(),
            "machine": self.machine,
            "memory": self.memory.as_data(),
            "seconds": self.seconds,
            "rules": [each.as_data() for each in self.tried],
        }
        found = self.found
        if found is None or found.chosen is None:
            return data
        return {
            **data,
            "choice": asdict(found.chosen),
            "default": asdict(found.default),
            "reason": found.reason,
            "turns": found.turns,
            "settings": [_row(found, setting) for setting in found.settings],
            "not_run": [{**asdict(setting), "reason": reason} for setting, reason in self.absent.items()],
        }


def tune(place: Place, recipe: Recipe, wishes: Wishes, machine: dict[str, Any], tell: Callable[[str], None]) -> Tuning:
    """Look at memory, find the fastest setting, and measure what would change bits.

    Args:
        machine: that this happens on, described before it was busy with it.
        tell: hears what is done next.

    Raises:
        RankError: the recipe cannot be run.
        StoppedError: somebody asked to end.
    """
    began = time.perf_counter()
    processes = place.processes
    launched = partial(_launched, wishes=wishes, processes=processes)
    memory, seen = examine(recipe, wishes.memory, lambda it: launched("look", it, wishes.options, wishes.memory), tell)
    tuning = Tuning(place, machine, memory)
    if seen is not None:
        tell("workers and prefetch:")
        tuning.found, tuning.absent = _find(recipe, wishes, Setting(seen.workers), launched)
        for each in candidates(recipe, seen, wishes.rules, machine["cores"], processes):
            if isinstance(each, Rule):
                tell(f"what would change bits: {each}")
            tuning.tried.append(_tried(recipe, each, wishes, launched) if isinstance(each, Rule) else each)
    tuning.seconds = time.perf_counter() - began
    return tuning


def _find(
    recipe: Recipe, wishes: Wishes, default: Setting, launched: Callable[..., Any]
) -> tuple[Found, dict[Setting, str]]:
    """The fastest setting; without those that a rank fails of, nor any with as many workers."""
    settings, absent = list(wishes.settings), {}
    while True:
        try:
            found: Found = launched("find", recipe, wishes.options, settings, default, wishes.seconds)
        except RankError as error:
            culprit = next((s for s in settings if s.workers and f"trial of {s}" in error.failure.where), None)
            if culprit is None:
                raise
            absent[culprit] = str(error).splitlines()[0]
            settings = [s for s in settings if s.workers < culprit.workers]
            default = default if default.workers < culprit.workers else Setting(0)
            if not settings:
                raise
        else:
            return found, absent


def _tried(recipe: Recipe, rule: Rule, wishes: Wishes, launched: Callable[..., Any]) -> Tried:
    try:
        times = launched("against", recipe, rule.applied(recipe), wishes.options, wishes.rounds, wishes.seconds)
    except RankError as error:
        return Tried(rule, reason=str(error).splitlines()[0])
    return Tried(rule, Spread.of(times))


def _launched(function: str, *arguments: Any, wishes: Wishes, processes: int) -> Any:
    preload = (*wishes.preload, _TRIALS)
    named = ByName(_TRIALS, function)
    found = launch(named, *arguments, processes=processes, preload=preload, environment=wishes.environment)
    if found is None:
        raise StoppedError("tuning was stopped, and nothing is written", do="start it again")
    return found


def _row(found: Found, setting: Setting) -> dict[str, Any]:
    return {
        **asdict(setting),
        "samples_per_second": asdict(found.speed(setting)),
        "against_default": asdict(found.against_default(setting)),
        "data_share": found.data_share(setting),
        "verdict": found.verdict(setting),
        "turns": [
            {"round": number, **asdict(turns[setting])} for number, turns in enumerate(found.rounds) if setting in turns
        ],
    }
