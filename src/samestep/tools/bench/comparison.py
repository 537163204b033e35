"""Contenders in turn, round by round, and what comes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.config import RunOptions
from samestep.runtime.by_name import ByName
from samestep.runtime.launch import RankError, StoppedError, launch
from samestep.tools.bench.contenders import Absent, Contender
from samestep.tools.bench.trials import Reached
from samestep.tools.timed import Spread, Timed

_TRIALS = "samestep.tools.bench.trials"


@dataclass
class Row:
    """What was found of one contender.

    Attributes:
        rounds: its trials, one a round.
        speeds_of_one: samples a second of one device in the same rounds.
    """

    contender: Contender
    reached: Reached
    rounds: list[Timed] = field(default_factory=list)
    speeds_of_one: list[float] = field(default_factory=list)

    @property
    def speed(self) -> Spread:
        """Samples a second."""
        return Spread.of([timed.samples_per_second for timed in self.rounds])

    @property
    def speed_up(self) -> Spread:
        """Against one device, of each round by itself."""
        return Spread.of([t.samples_per_second / one for t, one in zip(self.rounds, self.speeds_of_one, strict=True)])

    @property
    def efficiency(self) -> float:
        """How much of what as many devices could be faster they are."""
        return self.speed_up.median / self.contender.devices

    @property
    def epoch_seconds(self) -> float:
        """The time of an epoch's steps, evaluation aside."""
        return self.reached.steps_in_epoch * statistics.median(timed.step_seconds for timed in self.rounds)

    @property
    def data_share(self) -> float:
        """How much of a step is the wait for its batch."""
        return statistics.median(timed.data_share for timed in self.rounds)

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "name": self.contender.name,
            "devices": self.contender.devices,
            "processes": self.contender.processes,
            "shards": self.contender.recipe.shards,
            "samples_per_second": asdict(self.speed),
            "speed_up": asdict(self.speed_up),
            "efficiency": self.efficiency,
            "epoch_seconds": self.epoch_seconds,
            "data_share": self.data_share,
            "memory_held_bytes": self.reached.held,
            "memory_peak_bytes": self.reached.peak,
            "evaluation": self.reached.evaluation,
            "rounds": [asdict(timed) for timed in self.rounds],
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How contenders are compared.

    Attributes:
        rounds: trials of each, in turn with the others.
        steps: of a trial.
        epochs: how long each is trained for its evaluation; with 0 there is none.
        preload: modules that all ranks need.
    """

    rounds: int
    steps: int
    epochs: int
    options: RunOptions
    preload: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """What was found of a recipe on a machine.

    Attributes:
        recipe: the resolved recipe.
        machine: what it was made on.
        absent: ways that could not be run.
    """

    name: str
    recipe: dict[str, Any]
    machine: dict[str, Any]
    plan: Plan
    rows: list[Row]
    absent: list[Absent]

    @property
    def metric(self) -> str | None:
        """What evaluations are told by: the recipe's first metric, the loss where it has none."""
        values = self.rows[0].reached.evaluation
        return next((name for name in values if name not in ("loss", "samples")), "loss" if values else None)

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "recipe": self.recipe,
            "machine": self.machine,
            "epochs": self.plan.epochs,
            "steps": self.plan.steps,
            "ways": [row.as_data() for row in self.rows],
            "not_run": [asdict(each) for each in self.absent],
        }


def compare(contenders: Sequence[Contender], plan: Plan, tell: Callable[[str], None]) -> tuple[list[Row], list[Absent]]:
    """Train each contender once, then time all of them in turn.

    Rounds go through all contenders, those of as many ranks in the same processes, so that a machine that gets slower
    does so for all. The first contender is what others are compared with.

    Args:
        tell: hears what is done next.

    Returns:
        What was found, and contenders that could not be run.

    Raises:
        RankError: the first contender failed.
        StoppedError: somebody asked to end.
    """
    rows: list[Row] = []
    absent: list[Absent] = []
    for number, contender in enumerate(contenders):
        tell(f"training {contender.name} on {_devices(contender.devices)} ({number + 1} of {len(contenders)})")
        try:
            reached = _launched("reach", contender, plan.epochs, plan.options, plan=plan, processes=contender.processes)
        except RankError as error:
            if not rows:
                raise
            absent.append(Absent(contender.name, contender.devices, str(error).splitlines()[0]))
        else:
            rows.append(Row(contender, reached))
    for number in range(plan.rounds):
        tell(f"timing, round {number + 1} of {plan.rounds}")
        _round(rows, plan, backwards=number % 2 == 1)
    return rows, absent


def _round(rows: Sequence[Row], plan: Plan, *, backwards: bool) -> None:
    """One trial of each contender."""
    for processes in sorted({row.contender.processes for row in rows}, reverse=backwards):
        same = [row for row in rows if row.contender.processes == processes]
        same = same[::-1] if backwards else same
        ways = [row.contender for row in same]
        found = _launched("time_all", ways, plan.steps, plan.options, plan=plan, processes=processes)
        for row, timed in zip(same, found, strict=True):
            row.rounds.append(timed)
    one = rows[0].rounds[-1].samples_per_second
    for row in rows:
        row.speeds_of_one.append(one)


def _launched(function: str, *arguments: Any, plan: Plan, processes: int) -> Any:
    found = launch(ByName(_TRIALS, function), *arguments, processes=processes, preload=(*plan.preload, _TRIALS))
    if found is None or (isinstance(found, list) and None in found):
        raise StoppedError("the benchmark was stopped", do="start it again, with fewer rounds or ways")
    return found


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"
