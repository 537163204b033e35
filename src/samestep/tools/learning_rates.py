"""`samestep bench --lr`: a learning rate for a recipe, from steps with a growing rate.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from samestep.config import Recipe, RunOptions
from samestep.tools.launch import run_on_ranks

STEPS = 100
FIRST_RATE = 1e-6
LAST_RATE = 10.0
DIVERGED = 4.0  # times the smallest loss, after which the trial ends
_SMOOTHING = 0.9  # share of the mean so far in an exponential moving average
_BAR = 40  # characters
_ROWS = 16


@dataclass(frozen=True)
class Trial:
    """Learning rates of steps in order, with the loss of each, as a moving average."""

    rates: list[float]
    losses: list[float]

    def suggestion(self) -> float | None:
        """Return the rate at which the loss falls most steeply, before its minimum.

        None if the loss never falls.
        """
        lowest = self.losses.index(min(self.losses))
        falls = [before - after for before, after in pairwise(self.losses[: lowest + 1])]
        if not falls:
            return None
        return self.rates[falls.index(max(falls))]


def rates(steps: int) -> list[float]:
    """Return a rate for each step; the ratio of neighbours is constant."""
    growth = (LAST_RATE / FIRST_RATE) ** (1 / max(1, steps - 1))
    return [FIRST_RATE * growth**step for step in range(steps)]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the moving average of losses, without a bias to its start at zero."""
    result = []
    mean = 0.0
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        result.append(mean / (1 - _SMOOTHING**number))
    return result


def find(
    recipe: Recipe, options: RunOptions, steps: int, processes: int, preload: Sequence[str]
) -> dict[str, Any]:
    """Train steps with growing rates; return the rates, the losses and a suggestion.

    Raises:
        RankError: a step failed.
        StoppedError: a stop was requested.
    """
    found: list[tuple[float, float]] = run_on_ranks(
        "samestep.tools.bench_worker",
        "losses_of_rates",
        recipe,
        rates(steps),
        options,
        processes=processes,
        preload=tuple(preload),
    )
    trial = Trial([rate for rate, _ in found], smoothed([loss for _, loss in found]))
    return {**asdict(trial), "lr": trial.suggestion()}


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last of some losses is not finite, or many times the smallest mean."""
    means = smoothed(losses)
    return not math.isfinite(means[-1]) or means[-1] > DIVERGED * min(means)


def lines_of(data: dict[str, Any]) -> list[str]:
    """Return the losses as bars, and the suggestion."""
    losses = data["losses"]
    stride = math.ceil(len(losses) / _ROWS)
    lines = [f"{'lr':>10}  {'loss':>8}"]
    for rate, loss in list(zip(data["rates"], losses, strict=True))[::stride]:
        bar = "█" * round(_BAR * max(0.0, loss) / max(losses))
        lines.append(f"{rate:>10.2e}  {loss:>8.4g}  {bar}")
    if data["lr"] is None:
        return [*lines, "", "no suggestion: the loss falls at no rate"]
    return [*lines, "", f"suggested   lr={data['lr']:.2g}: here the loss falls most steeply"]
