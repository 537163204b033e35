"""Comparison of numbers of loader processes by `samestep bench --workers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe
from samestep.tools.bench import Plan, speeds_of
from samestep.tools.timing import Spread, Timing
from samestep.units import plural

WORKERS = (0, 1, 2, 4, 8)
_ALIKE = 0.02  # relative difference of speeds that count as equal


def compare_workers(
    recipe: Recipe, counts: Sequence[int], devices: Sequence[int], plan: Plan, report: Callable[[str], None]
) -> dict[str, Any]:
    """Time the recipe with each number of loader processes on each number of devices; return plain data.

    Args:
        recipe: recipe of all trials, which no number of loader processes changes.
        counts: loader processes of a rank; the first is the baseline.
        devices: numbers of ranks.
        plan: rounds and steps.
        report: receives progress messages.

    Raises:
        RankError: a rank failed, such as one without memory for its loader processes.
        StoppedError: a stop was requested.
    """
    rows: list[dict[str, Any]] = []
    fastest: list[dict[str, int]] = []
    for number in devices:
        report(f"{plural(len(counts), 'number')} of loader processes on {plural(number, 'device')}")
        rounds = plan.run("time_workers", recipe, counts, plan.rounds, plan.steps, processes=number)
        compared = [_row(number, count, position, rounds) for position, count in enumerate(counts)]
        rows += compared
        fastest.append({"devices": number, "workers": _fewest_of_fastest(compared)})
    return {"steps": plan.steps, "workers": rows, "fastest": fastest}


def _row(devices: int, count: int, position: int, rounds: Sequence[Sequence[Timing]]) -> dict[str, Any]:
    timings = [timings[position] for timings in rounds]
    speeds = speeds_of(timings, [timings[0] for timings in rounds])
    return {"devices": devices, "workers": count, **speeds, "rounds": [asdict(timing) for timing in timings]}


def _fewest_of_fastest(rows: Sequence[dict[str, Any]]) -> int:
    """Return the smallest number of loader processes among those that are about as fast as the fastest."""
    speed_ups: dict[int, float] = {row["workers"]: row["speed_up"]["median"] for row in rows}
    least = (1 - _ALIKE) * max(speed_ups.values())
    return min(count for count, speed_up in speed_ups.items() if speed_up >= least)


def show_workers(data: dict[str, Any]) -> None:
    """Print a comparison of numbers of loader processes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("devices", "workers", "samples/s", "speed-up", "waits for data"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in data["workers"]:
        table.add_row(
            str(row["devices"]),
            str(row["workers"]),
            f"{row['samples_per_second']['median']:,.0f}",
            Spread(**row["speed_up"]).format(".2f"),
            f"{row['data_share']:.0%}",
        )
    Console().print(table)
    print()
    for choice in data["fastest"]:
        print(f"fastest     --workers {choice['workers']} on {plural(choice['devices'], 'device')}")
