"""`samestep bench`: variants of a recipe, each trained once, then all timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions, StrategyConfig, resolve_mesh
from samestep.errors import InputError
from samestep.launcher.launch import RankError
from samestep.tools.timing import Spread, Timing, run_trial
from samestep.units import plural

SINGLE = "one device"
_MICROBATCHES_PER_RANK = 4
_TRIALS = "samestep.tools.trials"
_MAX_WIDTH = 200
_LEAST_DATA_SHARE = 0.05  # smaller waits for data get no column
# Okabe and Ito's colors, which are distinct for color-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class Contender:
    """Variant of a recipe, on a number of ranks and of devices of all ranks."""

    name: str
    processes: int
    devices: int
    recipe: Recipe


@dataclass(frozen=True)
class Absent:
    """Variant that cannot run, with the reason."""

    name: str
    devices: int
    reason: str


def contenders(
    recipe: Recipe, devices: Sequence[int], strategies: Sequence[StrategyConfig], available: int | None
) -> tuple[list[Contender], list[Absent]]:
    """Return the variants to compare, one device first as the baseline, and the variants that cannot run.

    Args:
        recipe: recipe of all variants.
        devices: numbers of devices.
        strategies: additional strategies.
        available: number of devices; None if ranks can share a device, as on a CPU.
    """
    result: list[Contender] = []
    absent: list[Absent] = []
    for number in sorted({1, *devices}):
        for name, changes in _variants(number, strategies, recipe.microbatches):
            if available is not None and number > available:
                absent.append(Absent(name, number, f"this machine has {plural(available, 'device')}"))
                continue
            try:
                step = replace(recipe.step, **changes.pop("step", {}))
                changed = replace(recipe, step=step, **changes)
                processes = 1 if changed.strategy.name == "dp" else number
                resolve_mesh(changed.strategy, processes, changed.microbatches)
            except InputError as error:
                absent.append(Absent(name, number, error.value))
            else:
                result.append(Contender(name, processes, number, changed))
    return result, absent


def _variants(
    number: int, strategies: Sequence[StrategyConfig], microbatches: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and changed keys of the variants for a number of devices, the plain one first."""
    # One microbatch per rank is the cheapest step.
    plain = {"microbatches": number, "strategy": StrategyConfig()}
    several = _MICROBATCHES_PER_RANK
    prefix = "" if number == 1 else "ddp, "
    yield SINGLE if number == 1 else "ddp", {**plain}
    yield f"{prefix}{microbatches} microbatches as in the recipe", {"strategy": StrategyConfig()}
    yield f"{prefix}{several} microbatches a rank", {**plain, "microbatches": several * number}
    yield f"{prefix}bf16", {**plain, "step": {"precision": "bf16"}}
    yield f"{prefix}sync BN", {**plain, "step": {"batch_norm": "sync"}}
    if number > 1:
        yield "ddp, fast sum", {**plain, "step": {"reduction": "fast"}}
        yield "ddp, fp16 compression", {**plain, "strategy": StrategyConfig(name="ddp", hook="fp16")}
        yield "dp", {**plain, "strategy": StrategyConfig(name="dp", devices=number)}
        for strategy in strategies:
            sizes = ", ".join(f"{axis} {size}" for axis, size in strategy.mesh.sizes.items())
            yield f"{strategy.name} ({sizes})" if sizes else strategy.name, {**plain, "strategy": strategy}


@dataclass(frozen=True)
class Trained:
    """Result of the training of a variant."""

    evaluation: dict[str, float]  # the loss and the metrics of the recipe
    held: int  # bytes of parameters, gradients, buffers and optimizer state; the largest of all ranks
    peak: int | None  # peak GPU memory in bytes, the largest of all ranks; None on a CPU
    steps_in_epoch: int


@dataclass
class Row:
    """Trials of a variant, one per round."""

    contender: Contender
    trained: Trained
    rounds: list[Timing] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a comparison."""

    rounds: int  # number of trials of each variant
    steps: int  # steps of a trial
    epochs: int  # training epochs before the evaluation; 0 for no evaluation
    options: RunOptions
    preload: tuple[str, ...]  # modules that all ranks import

    def run(self, function: str, *arguments: Any, processes: int) -> Any:
        """Run a function of `samestep.tools.trials` on all ranks."""
        return run_trial(_TRIALS, function, *arguments, self.options, processes=processes, preload=self.preload)


def compare(
    contenders: Sequence[Contender], absent: Sequence[Absent], plan: Plan, report: Callable[[str], None]
) -> dict[str, Any]:
    """Train each variant once, then time all of them in turn; return the results as plain data.

    Every round contains all variants, those with equally many ranks in the same processes: a machine that becomes
    slower affects all variants alike.

    Args:
        contenders: variants; the first is the baseline.
        absent: variants that cannot run.
        plan: rounds, steps and epochs.
        report: receives progress messages.

    Raises:
        RankError: the first variant failed.
        StoppedError: a stop was requested.
    """
    rows: list[Row] = []
    failed: list[Absent] = []
    for number, contender in enumerate(contenders, start=1):
        devices = plural(contender.devices, "device")
        report(f"training {contender.name} on {devices} ({number} of {len(contenders)})")
        try:
            trained = plan.run("train_contender", contender, plan.epochs, processes=contender.processes)
        except RankError as error:
            if not rows:
                raise
            failed.append(Absent(contender.name, contender.devices, str(error).splitlines()[0]))
        else:
            rows.append(Row(contender, trained))
    for number in range(plan.rounds):
        report(f"timing, round {number + 1} of {plan.rounds}")
        _time_round(rows, plan, is_reversed=number % 2 == 1)
    return comparison_data(plan, rows, [*absent, *failed])


def _time_round(rows: Sequence[Row], plan: Plan, *, is_reversed: bool) -> None:
    for processes in sorted({row.contender.processes for row in rows}, reverse=is_reversed):
        group = [row for row in rows if row.contender.processes == processes][:: -1 if is_reversed else 1]
        timings = plan.run("time_contenders", [row.contender for row in group], plan.steps, processes=processes)
        for row, timing in zip(group, timings, strict=True):
            row.rounds.append(timing)


def comparison_data(plan: Plan, rows: Sequence[Row], absent: Sequence[Absent]) -> dict[str, Any]:
    """Return the results of all variants, with speeds relative to the first."""
    return {
        "epochs": plan.epochs,
        "steps": plan.steps,
        "ways": [_row_data(row, rows[0]) for row in rows],
        "not_run": [asdict(variant) for variant in absent],
    }


def _row_data(row: Row, baseline: Row) -> dict[str, Any]:
    contender, trained = row.contender, row.trained
    speeds = [timing.samples_per_second for timing in row.rounds]
    pairs = zip(speeds, baseline.rounds, strict=True)
    speed_up = Spread.of([speed / base.samples_per_second for speed, base in pairs])
    return {
        "name": contender.name,
        "devices": contender.devices,
        "processes": contender.processes,
        "microbatches": contender.recipe.microbatches,
        "samples_per_second": asdict(Spread.of(speeds)),
        "speed_up": asdict(speed_up),
        "efficiency": speed_up.median / contender.devices,
        "epoch_seconds": trained.steps_in_epoch * statistics.median(timing.step_seconds for timing in row.rounds),
        "data_share": statistics.median(timing.data_share for timing in row.rounds),
        "memory_held_bytes": trained.held,
        "memory_peak_bytes": trained.peak,
        "evaluation": trained.evaluation,
        "rounds": [asdict(timing) for timing in row.rounds],
    }


def show(data: dict[str, Any]) -> None:
    """Print a comparison."""
    console, shown = Console(), table(data["ways"])
    # A table wrapped by the terminal is more legible than a truncated one.
    width = console.measure(shown, options=console.options.update(width=_MAX_WIDTH)).maximum
    Console(width=max(console.width, width)).print(shown)
    rounds, metric = len(data["ways"][0]["rounds"]), first_metric(data["ways"])
    print(f"\nspeed-up    relative to one device in the same round: median of {rounds} ± half the interquartile range")
    if metric is not None:
        print(f"{metric:<12}after {plural(data['epochs'], 'epoch')}")
    for absent in data["not_run"]:
        print(f"not run     {absent['name']} on {absent['devices']}: {absent['reason']}")


def first_metric(ways: Sequence[dict[str, Any]]) -> str | None:
    """Return the first metric of the recipe, or `loss` without metrics; None without evaluation."""
    values = ways[0]["evaluation"]
    return next((name for name in values if name not in ("loss", "samples")), "loss" if values else None)


def table(ways: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per variant."""
    metric = first_metric(ways)
    is_peak = any(way["memory_peak_bytes"] is not None for way in ways)
    shows_waits = any(way["data_share"] > _LEAST_DATA_SHARE for way in ways)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    last = None
    for way in ways:
        memory = way["memory_held_bytes"] if way["memory_peak_bytes"] is None else way["memory_peak_bytes"]
        cells = {
            "devices": str(way["devices"]) if way["devices"] != last else "",
            "variant": way["name"],
            "samples/s": f"{way['samples_per_second']['median']:,.0f}",
            "epoch": f"{way['epoch_seconds']:.3g} s",
            "speed-up": Spread(**way["speed_up"]).format(".2f"),
            "efficiency": f"{way['efficiency']:.0%}",
            "peak MiB" if is_peak else "MiB held": f"{memory / 2**20:,.1f}",
        }
        if shows_waits:
            cells["waits for data"] = f"{way['data_share']:.0%}"
        if metric is not None:
            cells[metric] = f"{way['evaluation'][metric]:{'.4f' if metric == 'loss' else '.2%'}}"
        if not shown.columns:
            for name in cells:
                shown.add_column(name, justify="left" if name == "variant" else "right", no_wrap=name != "devices")
        shown.add_row(*cells.values())
        last = way["devices"]
    return shown


def draw(ways: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG with a bar per variant: the speed-up, with the spread over rounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.32 * len(ways)), dpi=150, layout="constrained")
    axes = figure.subplots()
    numbers = sorted({way["devices"] for way in ways})
    colors = dict(zip(numbers, COLORS * len(numbers), strict=False))
    for position, way in enumerate(ways):
        spread, speed = Spread(**way["speed_up"]), way["samples_per_second"]["median"]
        errors = [[spread.median - spread.q1], [spread.q3 - spread.median]]
        color = colors[way["devices"]]
        axes.barh(position, spread.median, color=color, xerr=errors, ecolor="#444444", capsize=2)
        axes.text(spread.q3 + 0.02, position, f"{speed:,.0f} samples/s", va="center", fontsize=7)
    names = [f"{way['name']}  ({way['devices']})" for way in ways]
    axes.set_yticks(range(len(ways)), names, fontsize=8)
    axes.set_ylim(len(ways) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlabel("samples/s relative to one device; number of devices in parentheses")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
