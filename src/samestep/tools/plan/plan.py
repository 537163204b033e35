"""`samestep plan`: calibration of a recipe on this machine, predictions for all layouts, and the choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions
from samestep.errors import InputError
from samestep.tools.bench import COLORS
from samestep.tools.plan.calibration import Calibration
from samestep.tools.plan.collectives import Cluster, Link
from samestep.tools.plan.layouts import Infeasible, Layout, find_layouts
from samestep.tools.plan.model import LayoutModel
from samestep.tools.plan.scaling import Failures, scaling_curve
from samestep.tools.timing import run_trial
from samestep.units import format_bytes, format_duration, format_milliseconds, format_percent, plural

_TRIALS = "samestep.tools.plan.trial"
_SHOWN = 12  # layouts in the table
_WIDTH = 140
_LEAST = 2  # ranks of a trial of a strategy
_CLOSE, _CONTENDERS = 1.25, 2  # layouts that are run, if their prediction is at most this factor of the fastest one
_AXES = {"ddp": "replicate", "fsdp": "shard", "tp": "tensor", "pp": "pipeline"}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Configuration of a plan.

    Attributes:
        devices: number of devices.
        nodes: number of nodes with equally many devices.
        link: link of a node to the others.
        memory: memory of a device in bytes; None without a limit.
        failures: failures of devices.
        local: number of ranks that this machine can start for the calibration.
        seconds: approximate duration of one measurement.
        options: device and loader workers.
        preload: modules that all ranks import.
    """

    devices: int
    nodes: int
    link: Link
    memory: int | None
    failures: Failures
    local: int
    seconds: float
    options: RunOptions
    preload: tuple[str, ...]


def plan(recipe: Recipe, config: PlanConfig, report: Callable[[str], None]) -> dict[str, Any]:
    """Calibrate a recipe, predict all layouts, and choose one; return plain data.

    Raises:
        InputError: no layout can run.
        RankError: the recipe cannot run.
        StoppedError: a stop was requested.
    """
    layouts, infeasible = find_layouts(recipe, config.devices)
    if not layouts:
        raise _no_layout(config.devices, infeasible)
    began = time.monotonic()
    ranks = min(config.local, config.devices // config.nodes)
    report(f"calibration of {plural(len(layouts), 'layout')} on {plural(ranks, 'rank')} of this machine")
    calibration = calibrate(recipe, config, layouts, ranks)
    possible = [layout for number, layout in enumerate(layouts) if number not in calibration.facts.reasons]
    reasons = calibration.facts.reasons.items()
    infeasible += [Infeasible(layouts[number].name, reason) for number, reason in reasons]
    if not possible:
        raise _no_layout(config.devices, infeasible)
    if ranks == config.devices:
        calibration = _with_contenders(calibration, recipe, config, possible)
    seconds = time.monotonic() - began
    model = _model(calibration, recipe, config)
    rows = _rows(model, possible, recipe, config.memory)
    fitting = [row for row in rows if row["fits"]]
    chosen = fitting[0] if fitting else None
    curve: list[dict[str, Any]] = []
    if chosen is not None:
        layout = next(layout for layout in possible if layout.name == chosen["name"])
        curve = [asdict(point) for point in scaling_curve(model, layout, recipe, config.failures)]
    return {
        "devices": config.devices,
        "nodes": config.nodes,
        "memory_limit": config.memory,
        "calibration_seconds": seconds,
        "calibration": asdict(calibration),
        "layouts": rows,
        "infeasible": [asdict(layout) for layout in infeasible],
        "chosen": chosen and chosen["name"],
        "runner_up": fitting[1]["name"] if len(fitting) > 1 else None,
        "curve": curve,
        "failures": asdict(config.failures),
    }


def _no_layout(devices: int, infeasible: Sequence[Infeasible]) -> InputError:
    return InputError(
        f"no layout of this recipe has {plural(devices, 'device')}: {infeasible[0].name}: {infeasible[0].reason}",
        expected="a number of devices that some mesh divides among microbatches, shards, slices and stages",
        fix="--devices with a smaller number, or --set microbatches with a larger one",
        code="E_MESH",
    )


def calibrate(recipe: Recipe, config: PlanConfig, layouts: Sequence[Layout], ranks: int) -> Calibration:
    """Measure steps without communication and messages, and then one trial of each kind of strategy."""
    levels = sorted({2**power for power in range(1, ranks.bit_length())} | ({ranks} if ranks > 1 else set()))
    strategies = [layout.strategy for layout in layouts]

    arguments = (recipe, config.options, strategies, config.devices, levels, config.seconds)
    calibration: Calibration = run_trial(_TRIALS, "calibrate", *arguments, processes=ranks, preload=config.preload)
    trials = _trial_layouts(recipe, calibration, layouts, ranks, config.devices)
    results = _run_trials(recipe, config, list(trials.values()))
    return _with_overheads(calibration, recipe, trials, results, config.devices) if trials else calibration


def _run_trials(recipe: Recipe, config: PlanConfig, layouts: Sequence[Layout]) -> list[tuple[float, int]]:
    """Return time and memory of a step of each layout, each on as many ranks as it has; those of a size together."""
    results: dict[int, tuple[float, int]] = {}
    for size in sorted({layout.shape.size for layout in layouts}, reverse=True):
        numbers = [number for number, layout in enumerate(layouts) if layout.shape.size == size]
        strategies = [layouts[number].strategy for number in numbers]
        arguments = (recipe, strategies, config.options, config.seconds)
        timed = run_trial(_TRIALS, "try_strategies", *arguments, processes=size, preload=config.preload)
        results |= dict(zip(numbers, timed, strict=True))
    return [results[number] for number in range(len(layouts))]


def _trial_layouts(
    recipe: Recipe, calibration: Calibration, layouts: Sequence[Layout], ranks: int, devices: int
) -> dict[str, Layout]:
    """Return a layout for each kind of strategy among the layouts, on as many ranks as possible, up to `ranks`."""
    possible = [layout for number, layout in enumerate(layouts) if number not in calibration.facts.reasons]
    kinds = [kind for kind, axis in _AXES.items() if any(getattr(layout.shape, axis) > 1 for layout in possible)]
    result: dict[str, Layout] = {}
    while ranks >= _LEAST:
        allowed = possible if ranks == devices else find_layouts(recipe, ranks)[0]
        for layout in allowed:
            sizes = layout.strategy.mesh.sizes
            kind = next((kind for kind in kinds if sizes.get(_AXES[kind]) == ranks), None)
            if kind is not None and (kind != "pp" or ranks in calibration.facts.stages):
                result.setdefault(kind, layout)
        ranks //= 2
    return {kind: result[kind] for kind in kinds if kind in result}


def _with_overheads(
    calibration: Calibration,
    recipe: Recipe,
    trials: dict[str, Layout],
    results: Sequence[tuple[float, int]],
    devices: int,
) -> Calibration:
    """Return the calibration with the costs that the trials have beyond the model."""
    link = calibration.pairs[min(calibration.pairs)]
    overheads: dict[str, float] = {}
    rank_bytes = 0
    for (kind, layout), (seconds, peak) in zip(trials.items(), results, strict=True):
        cluster = Cluster(layout.shape.size, 1, calibration.pairs, link)
        model = LayoutModel(calibration, cluster, recipe.step.reduction == "exact", recipe.microbatch_count)
        beyond = seconds - model.step_time(layout).total
        overheads[kind] = beyond / model.overhead_units(layout, kind) / calibration.slowdown_of(layout.shape.size)
        if not rank_bytes:  # the peak of a process belongs to the first of its trials
            rank_bytes = round(calibration.base + peak - model.memory(layout).total)
    timed = zip(trials.values(), results, strict=True)
    measured = {layout.name: seconds for layout, (seconds, _) in timed if layout.shape.size == devices}
    return replace(calibration, overheads=overheads, measured=measured, rank_bytes=rank_bytes)


def _with_contenders(
    calibration: Calibration, recipe: Recipe, config: PlanConfig, layouts: Sequence[Layout]
) -> Calibration:
    """Return the calibration after runs of further layouts whose prediction is close to that of the fastest one."""
    rows = [row for row in _rows(_model(calibration, recipe, config), layouts, recipe, config.memory) if row["fits"]]
    close = [row["name"] for row in rows if row["step_seconds"] <= _CLOSE * rows[0]["step_seconds"]]
    names = [name for name in close if name not in calibration.measured][:_CONTENDERS]
    contenders = [layout for layout in layouts if layout.name in names and layout.shape.size > 1]
    timed = zip(contenders, _run_trials(recipe, config, contenders), strict=True)
    measured = {layout.name: seconds for layout, (seconds, _) in timed}
    return replace(calibration, measured={**calibration.measured, **measured})


def _model(calibration: Calibration, recipe: Recipe, config: PlanConfig) -> LayoutModel:
    cluster = Cluster(config.devices, config.nodes, calibration.pairs, config.link)
    return LayoutModel(calibration, cluster, recipe.step.reduction == "exact", recipe.microbatch_count)


def _rows(model: LayoutModel, layouts: Sequence[Layout], recipe: Recipe, limit: int | None) -> list[dict[str, Any]]:
    """Return the predictions of all layouts, the fastest first."""
    return sorted((_row(model, layout, recipe, limit) for layout in layouts), key=lambda row: row["step_seconds"])


def _row(model: LayoutModel, layout: Layout, recipe: Recipe, limit: int | None) -> dict[str, Any]:
    step, memory = model.step_time(layout).scaled(model.correction(layout)), model.memory(layout)
    return {
        "name": layout.name,
        "options": layout.options,
        "strategy": layout.strategy.name,
        "mesh": layout.strategy.mesh.sizes,
        "step_seconds": step.total,
        "samples_per_second": recipe.batch_size / step.total,
        "parts": asdict(step),
        "is_measured": layout.name in model.calibration.measured,
        "memory": memory.to_dict(),
        "sent_bytes": model.sent_bytes(layout),
        "is_exact": recipe.step.reduction == "exact" and layout.strategy.is_exact(recipe.step.tensor_slices),
        "fits": limit is None or memory.total <= limit,
    }


def show(data: dict[str, Any]) -> None:
    """Print layouts, the choice, layouts that cannot run, and the curve."""
    console = Console(width=max(Console().width, _WIDTH))
    console.print(_layout_table(data), "")
    for name, text in _lines(data):
        print(f"{name:<12}{text}")
    if data["curve"]:
        console.print("", _curve_table(data["curve"]))


def _layout_table(data: dict[str, Any]) -> Table:
    shown = _table("layout", "step", "compute", "update", "messages", "bubble", "samples/s", "memory", "results")
    for row in data["layouts"][:_SHOWN]:
        parts = row["parts"]
        shown.add_row(
            row["name"],
            format_milliseconds(row["step_seconds"]),
            *(f"{parts[name] / row['step_seconds']:.0%}" for name in ("compute", "update", "communication", "bubble")),
            f"{row['samples_per_second']:,.0f}",
            format_bytes(row["memory"]["total"]) + ("" if row["fits"] else " (too much)"),
            "same bits" if row["is_exact"] else "to rounding",
        )
    return shown


def _table(first: str, *others: str) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column(first, no_wrap=True)
    for name in others:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def _lines(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    rows = {row["name"]: row for row in data["layouts"]}
    hidden = len(rows) - _SHOWN
    if hidden > 0:
        yield "not shown", f"{plural(hidden, 'slower layout')}; --json has all"
    chosen = rows.get(data["chosen"])
    if chosen is None:
        yield "chosen", f"none: no layout fits in {format_bytes(data['memory_limit'])}"
    else:
        yield "chosen", f"{chosen['name']}: {chosen['options'] or 'one process, no option'}"
        yield (
            "memory",
            ", ".join(f"{name} {format_bytes(size)}" for name, size in chosen["memory"].items() if name != "total"),
        )
    if data["runner_up"] is not None and chosen is not None:
        ratio = rows[data["runner_up"]]["step_seconds"] / chosen["step_seconds"]
        yield "runner-up", f"{data['runner_up']}: {ratio:.2f} times the time of a step"
    yield "calibrated", f"in {format_duration(data['calibration_seconds'])}"
    if measured := [name for name, row in rows.items() if row["is_measured"]]:
        yield "run", f"{', '.join(measured)}; other layouts are predicted"
    for layout in data["infeasible"]:
        yield "not run", f"{layout['name']}: {layout['reason']}"


def _curve_table(curve: Sequence[dict[str, Any]]) -> Table:
    names = ("nodes", "batch", "step", "samples/s", "efficiency", "at the recipe's batch", "failure every")
    shown = _table("devices", *names, "checkpoint every", "useful")
    for point in curve:
        fixed = point["fixed_batch"]
        shown.add_row(
            f"{point['devices']:,}",
            f"{point['nodes']:,}",
            f"{point['batch_size']:,}",
            format_milliseconds(point["step_seconds"]),
            f"{point['samples_per_second']:,.0f}",
            format_percent(point["efficiency"]),
            "-" if fixed is None else f"{fixed:,.0f}",
            format_duration(point["mtbf"]),
            format_duration(point["checkpoint_interval"]),
            format_percent(point["useful"]),
        )
    return shown


def draw(data: dict[str, Any], title: str, path: Path) -> None:
    """Write a PNG: samples per second over devices, ideal and predicted, without and with failures."""
    from matplotlib.figure import Figure

    curve = data["curve"]
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    devices = [point["devices"] for point in curve]
    first = curve[0]["samples_per_second"] / devices[0]
    lines = {
        "linear": [first * number for number in devices],
        "predicted, batch grows with devices": [point["samples_per_second"] for point in curve],
        "the same, with failures and checkpoints": [point["samples_per_second"] * point["useful"] for point in curve],
        "predicted, batch of the recipe": [point["fixed_batch"] for point in curve],
    }
    colors = ("#888888", *COLORS)
    for (label, values), color in zip(lines.items(), colors, strict=False):
        known = [(number, value) for number, value in zip(devices, values, strict=True) if value is not None]
        style = "--" if label == "linear" else "-"
        axes.plot(*zip(*known, strict=True), style, color=color, label=label, linewidth=1, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("devices")
    axes.set_ylabel("samples/s")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
