"""What would make steps faster and changes bits: measured and told, never chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from samestep.config import Recipe
from samestep.tools.timed import Spread
from samestep.tools.tune.look import Look

THREADS, CHANNELS_LAST, COMPILE = "threads", "channels-last", "compile"
RULES = (THREADS, CHANNELS_LAST, COMPILE)
_WORTH = 1.03


@dataclass(frozen=True)
class Rule:
    """One change of a recipe's step rules.

    Attributes:
        key: of the recipe, such as `step.threads`.
        value: that would be set.
    """

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={str(self.value).lower()}"

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe by this rule."""
        return replace(recipe, step=replace(recipe.step, **{self.key.removeprefix("step."): self.value}))


@dataclass(frozen=True)
class Tried:
    """What a rule would do.

    Attributes:
        times: how many times as fast steps are; None where that could not be measured.
        reason: why not.
    """

    rule: Rule
    times: Spread | None = None
    reason: str = ""

    @property
    def is_worth_it(self) -> bool:
        """Whether steps are faster, by more than rounds differ."""
        return self.times is not None and self.times.median > _WORTH and self.times.q1 > 1

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        times = asdict(self.times) if self.times is not None else None
        return {"key": self.rule.key, "value": self.rule.value, "times_as_fast": times, "reason": self.reason}


def candidates(recipe: Recipe, seen: Look, names: Sequence[str], cores: int, processes: int) -> Iterator[Rule | Tried]:
    """What is to be measured of these rules, and those of which it is known beforehand that they cannot be.

    Args:
        cores: of the machine, that all ranks share.
    """
    if THREADS in names:
        most = cores // processes
        others = [count for count in (1, 2, 4, 8, 16, 32) if count <= most and count != recipe.step.threads]
        if seen.device != "cpu":
            yield Tried(Rule("step.threads", most), reason="steps are computed on GPUs")
        elif not others:
            yield Tried(Rule("step.threads", 2), reason=f"{processes} ranks on {cores} cores leave no core to spare")
        else:
            yield from (Rule("step.threads", count) for count in others)
    if CHANNELS_LAST in names:
        rule = Rule("step.channels_last", not recipe.step.channels_last)
        yield rule if seen.has_images else Tried(rule, reason="no input has the four dimensions of images")
    if COMPILE in names:
        yield Rule("step.compile", not recipe.step.compile)
