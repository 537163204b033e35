"""Shares of the microbatches in proportion to the measured speeds of the ranks, which change no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from samestep.config import Recipe, RunOptions
from samestep.config.strategy import resolve_mesh
from samestep.engine.share_balancer import divide, format_shares, step_seconds
from samestep.launcher.launch import RankError
from samestep.microbatches import owned_microbatches
from samestep.tools.bench import Contender
from samestep.tools.timing import Spread, Timing

WORTHWHILE = 1.05  # least speed-up of a proposal, predicted and measured
_STEPS = 6  # of each trial


def propose_shares(
    recipe: Recipe,
    processes: int,
    options: RunOptions,
    rounds: int,
    run: Callable[..., Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the speed of each rank, and try shares in proportion to the speeds if they promise a gain.

    Args:
        recipe: recipe of the trials.
        processes: number of ranks.
        options: options of the trials.
        rounds: number of comparisons with equal shares.
        run: runs a function of `samestep.tools.trials` on the ranks.
        report: receives progress messages.

    Returns:
        `speeds` in microbatches per second; `proposed` shares, or None; `predicted` and measured `times_as_fast`; and
        the `reason` if there was no measurement.
    """
    result: dict[str, Any] = {"speeds": [], "proposed": None, "predicted": None, "times_as_fast": None}
    reason, ranks = _obstacle(recipe, processes), processes
    if reason:
        return {**result, "reason": reason}
    report("speeds of the ranks")
    speeds: list[float] = run("rank_speeds", recipe, options, _STEPS)
    counts = divide(recipe.microbatch_count, speeds)
    equal = [len(owned_microbatches(recipe.microbatch_count, ranks, rank)) for rank in range(ranks)]
    predicted = step_seconds(equal, speeds) / step_seconds(counts, speeds)
    result |= {"speeds": speeds, "predicted": predicted}
    if predicted < WORTHWHILE:
        return {**result, "reason": "the ranks are equally fast"}
    report(f"shares {format_shares(counts)} and equal shares")
    changed = replace(recipe, strategy=replace(recipe.strategy, shares=tuple(counts)))
    pair = [Contender(name, processes, processes, variant) for name, variant in (("", recipe), ("shares", changed))]
    order = [contender for number in range(rounds) for contender in pair[:: -1 if number % 2 else 1]]
    try:
        timings: list[Timing] = run("time_contenders", order, _STEPS, options)
    except RankError as error:
        return {**result, "reason": str(error).splitlines()[0]}
    pairs = [timings[at : at + 2][:: -1 if at // 2 % 2 else 1] for at in range(0, len(timings), 2)]
    ratio = Spread.of([new.samples_per_second / base.samples_per_second for base, new in pairs])
    is_faster = ratio.median > WORTHWHILE and ratio.q1 > 1
    return {**result, "proposed": counts if is_faster else None, "times_as_fast": asdict(ratio), "reason": ""}


def _obstacle(recipe: Recipe, ranks: int) -> str:
    """Return why the speed of each rank cannot be measured; empty if it can."""
    if ranks == 1:
        return "one rank has all microbatches"
    if resolve_mesh(recipe.strategy, ranks).splits_model or recipe.step.batch_norm == "sync":
        return "the ranks wait for each other within a microbatch"
    if recipe.strategy.shares and recipe.strategy.shares != "auto":
        return f"the recipe has shares: {format_shares(recipe.strategy.shares)}"
    if recipe.microbatch_count < 2 * ranks:
        return f"{recipe.microbatch_count} microbatches are fewer than two per rank"
    return ""


def shares_text(data: dict[str, Any]) -> str:
    """Return the result in one line."""
    speeds = ", ".join(f"{speed:.3g}" for speed in data["speeds"])
    measured = f"; microbatches/s of the ranks: {speeds}" if speeds else ""
    if data["times_as_fast"] is None:
        return f"equal: {data['reason']}{measured}"
    ratio = Spread(**data["times_as_fast"])
    if data["proposed"] is None:
        return f"equal: others are {ratio.format('.2f')} times as fast{measured}"
    option = f"--shares {format_shares(data['proposed'])}"
    return f"{option}: {ratio.format('.2f')} times as fast; no result depends on it{measured}"
