"""A recipe's profile: trained on all ranks, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from samestep.config import Recipe
from samestep.recipes.parse import recipe_data
from samestep.runtime.by_name import ByName
from samestep.runtime.launch import StoppedError, launch
from samestep.tools.profile.advice import Advice
from samestep.tools.profile.causes import advise
from samestep.tools.profile.measured import Measured, Ran
from samestep.tools.profile.merge import write_merged
from samestep.tools.profile.plan import Plan
from samestep.tools.profile.steps import PHASES
from samestep.tools.profile.straggler import Straggler, straggler

TRACE, TENSORBOARD = "trace.json.gz", "tensorboard"
_TRIAL = "samestep.tools.profile.trial"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_QUIET = {"KINETO_LOG_LEVEL": "99"}  # else torch's profiler tells of itself on the terminal
_TRACE_OF = re.compile(r"^rank-(\d+)\.\d+\.pt\.trace\.json\.gz$")


@dataclass(frozen=True)
class Profiled:
    """What was found of a recipe on a machine.

    Attributes:
        name: of the recipe.
        recipe: resolved.
        machine: what it was made on.
        trace: all ranks' traces in one file; None where none was asked for.
    """

    name: str
    recipe: dict[str, Any]
    machine: dict[str, Any]
    plan: Plan
    found: Measured
    trace: Path | None

    @cached_property
    def advice(self) -> list[Advice]:
        """What would help most first; empty where nothing stands out."""
        return advise(self.found)

    @cached_property
    def straggler(self) -> Straggler | None:
        """The rank that the others wait for, if it is always the same."""
        return straggler(self.found)

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data; times in seconds, of a step."""
        found, plan = self.found, self.plan
        waiting = found.waiting
        return {
            "recipe": self.recipe,
            "machine": self.machine,
            "processes": found.size,
            "steps": {"wait": plan.wait, "warmup": plan.warmup, "active": plan.active, "traced": plan.traced},
            "step_seconds": found.step_seconds,
            "ranks": [
                {
                    "rank": rank,
                    **{phase: phases[phase] for phase in PHASES},
                    "waiting_for_a_later_rank": waiting.own[rank] if waiting.steps else None,
                    "hidden_communication": found.hidden[rank] if found.around.is_known_inside else None,
                }
                for rank, phases in enumerate(found.phases)
            ],
            "straggler": asdict(self.straggler) if self.straggler is not None else None,
            "late": {
                "last_to": waiting.last,
                "of": waiting.apart,
                "waited_for": waiting.seconds,
            },
            "advice": [
                {**asdict(each), "share": each.seconds / found.step_seconds, "number": number}
                for number, each in enumerate(self.advice, start=1)
            ],
            "traced": {str(rank): _traced(asdict(each)) for rank, each in found.traced.items()},
            "costs": asdict(found.costs),
            "circumstances": asdict(found.around),
            "notes": self.notes,
            "trace": str(self.trace) if self.trace is not None else None,
            "tensorboard": str(plan.folder / TENSORBOARD) if found.traced else None,
        }

    @cached_property
    def notes(self) -> list[str]:
        """What a reader must know of these numbers."""
        found, around = self.found, self.found.around
        told = []
        if around.device == "cpu" and found.size * around.threads > around.cores:
            told.append(
                f"{found.size} ranks share {around.cores} core{'s' if around.cores > 1 else ''} and take turns: fewer "
                "--processes may be as fast"
            )
        if not around.is_known_inside:
            seconds = [each.communication_seconds for each in found.traced.values()]
            seen = f"; torch's profiler saw {1e3 * max(seconds):.1f} ms of it a step" if any(seconds) else ""
            told.append(
                f"{around.strategy} communicates within forward and backward; not all of that is told apart from them "
                f"here{seen}"
            )
        if any(phases["computing"] for phases in found.phases):
            told.append("shards are computed together here: forward and backward are one, computing")
        if found.size > 1 and not found.waiting.steps:
            told.append("who is late is not known: ranks do not all take part in the same communication")
        return told


def profile(
    name: str,
    recipe: Recipe,
    plan: Plan,
    processes: int,
    machine: dict[str, Any],
    preload: tuple[str, ...] = (),
    environment: Mapping[str, str] = _NOTHING,
) -> Profiled:
    """Train on that many ranks, and put together what they noted.

    Args:
        machine: what it is made on.
        preload: modules that all ranks need.
        environment: variables to set in each rank.

    Raises:
        RankError: a rank failed.
        StoppedError: somebody asked to end.
    """
    ran: Ran | None = launch(
        ByName(_TRIAL, "profile_rank"),
        recipe,
        plan,
        processes=processes,
        preload=(*preload, _TRIAL),
        environment={**_QUIET, **environment},
    )
    if ran is None:
        raise StoppedError("the profile was stopped", do="start it again, with fewer steps")
    trace = None
    if ran.measured.traced:
        trace = plan.folder / TRACE
        files = traces_in(plan.folder / TENSORBOARD)
        # Not those of an earlier profile in the same folder.
        write_merged(trace, {rank: files[rank] for rank in ran.marks}, ran.marks, ran.traced_steps)
    return Profiled(name, recipe_data(recipe), machine, plan, ran.measured, trace)


def traces_in(folder: Path) -> Mapping[int, Path]:
    """The newest trace of each rank."""
    matches = sorted((path for path in folder.iterdir() if _TRACE_OF.match(path.name)), key=lambda path: path.name)
    return {int(match[1]): path for path in matches if (match := _TRACE_OF.match(path.name))}


def _traced(data: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "calls", "seconds")
    return {**data, "operators": [dict(zip(keys, each, strict=True)) for each in data["operators"]]}
