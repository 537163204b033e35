"""Where our step's time beyond the hand-written loop goes: `step_time.py --profile`.

Both run in the same processes, in turns, under Python's profiler (functions) and under torch's (operators, those of
background threads included). Both slow down the profiled code, small functions most: read differences, not sums.
"""

from __future__ import annotations

import cProfile
import os
import pstats
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import markdown_table
from step_contenders import HAND_WRITTEN, REDUCTIONS, Contender, Setting, build_contender, ours
from step_rounds import take_turn

import samestep

TURNS, BLOCK, SHOWN = 6, 5, 22


class Cost(NamedTuple):
    """Of one function or operator, a step: how often it is called, own and cumulative milliseconds."""

    calls: float
    own: float
    cumulative: float


Costs = dict[str, Cost]
Watch = Callable[[Callable[[], object]], Costs]


def profile(setting: Setting) -> str:
    """Return the report, on rank 0; a function for `samestep.launch`."""
    with samestep.start(device="cpu", reduction="fast") as world:
        base = build_contender(HAND_WRITTEN, setting, world)
        parts = [f"# {setting.model}, {world.size} processes, rank 0"]
        for reduction in REDUCTIONS:
            mine = build_contender(ours(reduction), setting, world)
            for contender in (base, mine):
                take_turn(contender, "ready", BLOCK, world)
            functions = _alternating(mine, base, _functions, world)
            operators = _alternating(mine, base, _operators, world)
            parts += [
                f"## {mine.name}: functions of samestep, most expensive first",
                _own_functions(functions[0]),
                f"## {mine.name} minus {base.name}: own time of functions (main thread)",
                _differences(*functions),
                f"## {mine.name} minus {base.name}: own time of operators (all threads)",
                _differences(*operators),
            ]
        return "\n\n".join(parts)


def _alternating(mine: Contender, base: Contender, watch: Watch, world: samestep.World) -> tuple[Costs, Costs]:
    """Mean costs a step of both, over turns in which they alternate."""
    seen: tuple[list[Costs], list[Costs]] = ([], [])
    for _ in range(TURNS):
        for contender, turns in zip((mine, base), seen, strict=True):
            turns.append(watch(partial(take_turn, contender, "ready", BLOCK, world)))
    return _mean(seen[0]), _mean(seen[1])


def _mean(turns: list[Costs]) -> Costs:
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for costs in turns:
        for name, cost in costs.items():
            totals[name] = [sum(pair) for pair in zip(totals[name], cost, strict=True)]
    steps = len(turns) * BLOCK
    return {name: Cost(*(value / steps for value in values)) for name, values in totals.items()}


def _functions(run: Callable[[], object]) -> Costs:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    stats: Any = pstats.Stats(profiler)
    return {
        _place(*key): Cost(calls, 1000 * own, 1000 * cumulative)
        for key, (_, calls, own, cumulative, _) in stats.stats.items()
    }


def _place(file: str, line: int, function: str) -> str:
    if not line:
        return function
    path = Path(file)
    inside = path.parts[path.parts.index("samestep") :] if "samestep" in path.parts else path.parts[-2:]
    return f"{'/'.join(inside)}:{line} {function}"


def _operators(run: Callable[[], object]) -> Costs:
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with _no_chatter(), torch.profiler.profile(activities=cpu, experimental_config=every_thread) as profiler:
        run()
    return {
        str(event.key): Cost(event.count, event.self_cpu_time_total / 1000, event.cpu_time_total / 1000)
        for event in profiler.key_averages()
    }


@contextmanager
def _no_chatter() -> Iterator[None]:
    """Torch's profiler announces its beginning and end from C++."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _own_functions(costs: Costs) -> str:
    found = sorted(((cost, name) for name, cost in costs.items() if name.startswith("samestep/")), key=_by_cumulative)
    rows = [[f"{cost.cumulative:.3f}", f"{cost.own:.3f}", f"{cost.calls:.1f}", name] for cost, name in found[:SHOWN]]
    return markdown_table(["ms a step", "of it own", "calls", "function"], rows)


def _by_cumulative(item: tuple[Cost, str]) -> float:
    return -item[0].cumulative


def _differences(mine: Costs, base: Costs) -> str:
    nothing = Cost(0, 0, 0)
    pairs = {name: (mine.get(name, nothing), base.get(name, nothing)) for name in mine | base}
    names = sorted(pairs, key=lambda name: -abs(pairs[name][0].own - pairs[name][1].own))
    rows = []
    for name in names[:SHOWN]:
        ours_, theirs = pairs[name]
        calls = f"{ours_.calls:.1f} / {theirs.calls:.1f}"
        rows.append([f"{ours_.own - theirs.own:+.3f}", f"{ours_.own:.3f} / {theirs.own:.3f}", calls, name[:90]])
    whole = sum(first.own - second.own for first, second in pairs.values())
    rows.append([f"{whole:+.3f}", "", "", "all"])
    return markdown_table(["ms a step more", "ours / theirs", "calls", "what"], rows)
