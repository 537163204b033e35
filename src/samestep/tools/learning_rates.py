"""`samestep bench --lr`: a learning rate for a recipe, from steps with a growing rate.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from samestep.config import Recipe, RunOptions
from samestep.errors import NonFiniteError
from samestep.tools.launch import run_on_ranks

STEPS = 100
# Useful rates of SGD and of Adam are well inside of this range.
FIRST_RATE = 1e-6
LAST_RATE = 10.0
DIVERGED = 4.0  # rise, relative to the smallest loss, after which the steps end
_SMOOTHING = 0.9  # share of the mean so far in an exponential moving average
_BAR = 40  # characters
_ROWS = 16


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


def suggestion(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Return the rate of the steepest fall before the smallest loss; None without a fall."""
    lowest = losses.index(min(losses))
    falls = [before - after for before, after in pairwise(losses[: lowest + 1])]
    if not falls:
        return None
    return rates[falls.index(max(falls))]


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last mean of some losses is far above the smallest one, or not finite."""
    means = smoothed(losses)
    lowest = min(means)
    return not means[-1] - lowest <= DIVERGED * abs(lowest)


def find(
    recipe: Recipe, options: RunOptions, steps: int, processes: int, preload: Sequence[str]
) -> dict[str, Any]:
    """Train steps with growing rates; return the rates, the losses and a suggestion as `lr`.

    Raises:
        RankError: a step failed.
        NonFiniteError: the first loss is not finite.
        StoppedError: a stop was requested.
    """
    losses: list[float] = run_on_ranks(
        "samestep.tools.bench_worker",
        "losses_of_rates",
        recipe,
        rates(steps),
        options,
        processes=processes,
        preload=tuple(preload),
    )
    if not losses:
        fix = "check data and model: samestep train stops at this step too"
        raise NonFiniteError("the loss of the first step is not finite", fix=fix)
    means = smoothed(losses)
    tried = rates(steps)[: len(losses)]
    return {"rates": tried, "losses": means, "lr": suggestion(tried, means)}


def lines_of(data: Mapping[str, Any]) -> list[str]:
    """Return some of the losses with bars from the smallest to the largest, and the suggestion."""
    losses = data["losses"]
    low = min(losses)
    span = max(losses) - low or 1.0
    stride = math.ceil(len(losses) / _ROWS)
    lines = [f"{'lr':>10}  {'loss':>8}"]
    for rate, loss in list(zip(data["rates"], losses, strict=True))[::stride]:
        bar = "█" * round(_BAR * (loss - low) / span)
        lines.append(f"{rate:>10.2e}  {loss:>8.4g}  {bar}")
    if data["lr"] is None:
        return [*lines, "", "no suggestion: the loss falls at no rate"]
    return [*lines, "", f"suggested   lr={data['lr']:.2g}: here the loss falls most steeply"]
