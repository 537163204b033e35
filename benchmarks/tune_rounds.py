"""Rank function of `tune.py`: the search and the grid, in the same processes."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

import samestep
from samestep.config import Recipe, RunOptions
from samestep.recipes.builder import build
from samestep.tools.trials import time_setting
from samestep.tools.tune.search import search
from samestep.tools.tune.settings import PREFETCH, WORKERS, Setting, grid

_AS_LONG_AS_IT_TAKES = 1e9  # a turn then has its 20 steps


def measure(recipe: Recipe, searches: int, rounds: int, again: int, seconds: float) -> dict[str, Any]:
    """Search some times, with a part of the grid's rounds before each; then the choice against the grid's best."""
    warnings.simplefilter("ignore")
    options = RunOptions(device="cpu", workers=0, quiet=True)
    settings = grid(WORKERS, PREFETCH)
    with samestep.start(device="cpu") as world:
        built = build(recipe, options, world)
        speeds: dict[Setting, list[float]] = {setting: [] for setting in settings}
        seconds_of_grid, found = 0.0, []
        for number in range(max(searches, rounds)):
            if number < rounds:
                began = time.perf_counter()
                for setting in settings[::-1] if number % 2 else settings:
                    speeds[setting].append(time_setting(built, setting, _AS_LONG_AS_IT_TAKES).samples_per_second)
                seconds_of_grid += time.perf_counter() - began
            if number < searches:
                began = time.perf_counter()
                chosen = search(lambda setting: time_setting(built, setting, seconds), settings, Setting(0))
                assert chosen.chosen is not None
                found.append((chosen.chosen, time.perf_counter() - began, chosen.trial_count))
            if world.is_main:
                print(f"  {recipe.data.options}: turn {number + 1}, {found[-1]}", flush=True)
        medians = {setting: sorted(values)[len(values) // 2] for setting, values in speeds.items()}
        best = max(medians, key=lambda setting: medians[setting])
        duels = {}
        for setting in dict.fromkeys(each[0] for each in found):
            ratios = []
            for number in range(again if setting != best else 0):
                pair = [best, setting][:: -1 if number % 2 else 1]
                speed = {one: time_setting(built, one, _AS_LONG_AS_IT_TAKES).samples_per_second for one in pair}
                ratios.append(speed[setting] / speed[best])
            duels[setting] = ratios or [1.0]
        return {
            "grid": [{**asdict(setting), "samples_per_second": values} for setting, values in speeds.items()],
            "grid_seconds": seconds_of_grid,
            "best": asdict(best),
            "searches": [
                {**asdict(setting), "seconds": spent, "turns": turns, "against_best": duels[setting]}
                for setting, spent, turns in found
            ],
        }
