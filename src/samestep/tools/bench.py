"""`samestep bench`: variants of a recipe, each trained once, then all timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions, StrategyConfig, resolve_mesh
from samestep.errors import InputError
from samestep.launcher.launch import RankError, StoppedError
from samestep.loggers.logger import format_metric
from samestep.tools.timing import Spread, Timing, run_trial
from samestep.units import plural

SINGLE = "one device"
# Variants that `--ways` selects. The baseline, one device, and the layouts of `--layout` always
# belong to a comparison.
WAYS = ("ddp", "dp", "accumulate", "bf16", "exact", "local_bn", "compression")
DEVICES = (1, 2, 4)
ACCUMULATE = (4,)  # parts of a batch, by default
WORKERS = (0, 1, 2, 4, 8)  # loader processes of `--workers`
_ALIKE = 0.02  # relative difference of speeds that count as equal
WARMUP_STEPS = 3  # of a trial, which allocate memory and select kernels
_TRIALS = "samestep.tools.trials"
_MAX_WIDTH = 200


@dataclass(frozen=True)
class Contender:
    """Variant of a recipe, on a number of ranks and of devices of all ranks.

    With several devices of one rank, these are those of torch's `nn.DataParallel`.
    """

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
    recipe: Recipe,
    devices: Sequence[int],
    strategies: Sequence[StrategyConfig],
    available: int | None,
    *,
    ways: Sequence[str] = WAYS,
    accumulate: Sequence[int] = ACCUMULATE,
) -> tuple[list[Contender], list[Absent]]:
    """Return the variants to compare, one device first as the baseline, and the variants that cannot run.

    Args:
        recipe: recipe of all variants.
        devices: numbers of devices.
        strategies: additional strategies.
        available: number of devices; None if ranks can share a device, as on a CPU.
        ways: names of the variants, some of `WAYS`.
        accumulate: numbers of parts of a batch, each a variant.
    """
    selected = set(ways)
    if "accumulate" in ways and 1 in accumulate:
        selected.add("ddp")  # one part is the plain variant
    result: list[Contender] = []
    absent: list[Absent] = []
    for number in sorted({1, *devices}):
        for way, name, changes in _variants(number, strategies, accumulate):
            if way is not None and way not in selected:
                continue
            if available is not None and number > available:
                absent.append(
                    Absent(name, number, f"this machine has {plural(available, 'device')}")
                )
                continue
            try:
                step = replace(recipe.step, **changes.pop("step", {}))
                changed = replace(recipe, step=step, **changes)
                resolve_mesh(changed.strategy, number, changed.microbatch_count)
            except InputError as error:
                absent.append(Absent(name, number, error.value))
                continue
            processes = 1 if way == "dp" else number
            if way == "dp" and available is None:
                absent.append(Absent(name, number, "torch's nn.DataParallel needs GPUs"))
            else:
                result.append(Contender(name, processes, number, changed))
    return result, absent


def _variants(
    number: int, strategies: Sequence[StrategyConfig], accumulate: Sequence[int]
) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
    """Yield way, name and changed keys of the variants for a number of devices, the plain one first.

    The baseline and the layouts have no way: they belong to every comparison.
    """
    plain: dict[str, Any] = {"strategy": StrategyConfig()}
    if number == 1:
        prefix = ""
        yield None, SINGLE, {**plain}
    else:
        prefix = "ddp, "
        yield "ddp", "ddp", {**plain}
    for several in dict.fromkeys(accumulate):
        if several > 1:
            yield "accumulate", f"{prefix}{several} parts", {**plain, "accumulate": several}
    yield "bf16", f"{prefix}bf16", {**plain, "step": {"precision": "bf16"}}
    yield "exact", f"{prefix}exact", {**plain, "step": {"reduction": "exact"}}
    if number > 1:
        yield "dp", "nn.DataParallel", {**plain}
        yield "local_bn", "ddp, local BN", {**plain, "step": {"batch_norm": "local"}}
        compressed = StrategyConfig(name="ddp", hook="bf16")
        yield "compression", "ddp, bf16 compression", {**plain, "strategy": compressed}
        for strategy in strategies:
            sizes = ", ".join(f"{axis} {size}" for axis, size in strategy.mesh.sizes.items())
            yield (
                None,
                f"{strategy.name} ({sizes})" if sizes else strategy.name,
                {**plain, "strategy": strategy},
            )


@dataclass(frozen=True)
class Trained:
    """Result of the training of a variant."""

    evaluation: dict[str, float]  # the loss and the metrics of the recipe
    held: (
        int  # bytes of parameters, gradients, buffers and optimizer state; the largest of all ranks
    )
    peak: int | None  # peak GPU memory in bytes, the largest of all ranks; None on a CPU
    samples_in_epoch: int


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
        return run_trial(
            _TRIALS, function, *arguments, self.options, processes=processes, preload=self.preload
        )


def compare(
    contenders: Sequence[Contender],
    absent: Sequence[Absent],
    plan: Plan,
    report: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Train each variant once, then time all of them in turn; return the results as plain data.

    Every round contains all variants, those with equally many ranks in the same processes: a
    machine that becomes slower affects all variants alike. A request to stop ends the comparison
    with the results so far.

    Args:
        contenders: variants; the first is the baseline.
        absent: variants that cannot run.
        plan: rounds, steps and epochs.
        report: receives progress messages.
        save: receives the results so far after each variant and each round.

    Raises:
        RankError: the first variant failed.
        StoppedError: a stop was requested before the first result.
    """
    rows: list[Row] = []
    failed: list[Absent] = []

    def results(*, is_complete: bool) -> dict[str, Any]:
        data = comparison_data(plan, rows, [*absent, *failed])
        data["complete"] = is_complete
        save(data)
        return data

    try:
        for number, contender in enumerate(contenders, start=1):
            devices = plural(contender.devices, "device")
            report(f"training {contender.name} on {devices} ({number} of {len(contenders)})")
            try:
                trained = plan.run(
                    "train_contender", contender, plan.epochs, processes=contender.processes
                )
            except RankError as error:
                if not rows:
                    raise
                failed.append(Absent(contender.name, contender.devices, str(error).splitlines()[0]))
            else:
                rows.append(Row(contender, trained))
            results(is_complete=False)
        for number in range(plan.rounds):
            report(f"timing, round {number + 1} of {plan.rounds}")
            _time_round(rows, plan, is_reversed=number % 2 == 1)
            results(is_complete=number + 1 == plan.rounds)
    except (StoppedError, KeyboardInterrupt):
        if not rows:
            raise
        return results(is_complete=False)
    return results(is_complete=True)


def _time_round(rows: Sequence[Row], plan: Plan, *, is_reversed: bool) -> None:
    for processes in sorted({row.contender.processes for row in rows}, reverse=is_reversed):
        group = [row for row in rows if row.contender.processes == processes][
            :: -1 if is_reversed else 1
        ]
        timings = plan.run(
            "time_contenders", [row.contender for row in group], plan.steps, processes=processes
        )
        for row, timing in zip(group, timings, strict=True):
            row.rounds.append(timing)


def comparison_data(plan: Plan, rows: Sequence[Row], absent: Sequence[Absent]) -> dict[str, Any]:
    """Return the results of all variants, with speeds relative to the first."""
    rounds = min(len(row.rounds) for row in rows)  # an interrupted round is left out
    return {
        "epochs": plan.epochs,
        "steps": plan.steps,
        "ways": [_row_data(row, rows[0], rounds) for row in rows],
        "not_run": [asdict(variant) for variant in absent],
    }


def _row_data(row: Row, baseline: Row, rounds: int) -> dict[str, Any]:
    contender = row.contender
    trained = row.trained
    data: dict[str, Any] = {
        "name": contender.name,
        "devices": contender.devices,
        "processes": contender.processes,
        "microbatches": contender.recipe.microbatches,
        **dict.fromkeys(
            ("samples_per_second", "speed_up", "efficiency", "epoch_seconds", "data_share")
        ),
        "memory_held_bytes": trained.held,
        "memory_peak_bytes": trained.peak,
        "evaluation": trained.evaluation,
        "rounds": [asdict(timing) for timing in row.rounds[:rounds]],
    }
    if not rounds:
        return data
    data |= speeds_of(row.rounds[:rounds], baseline.rounds[:rounds])
    data["efficiency"] = data["speed_up"]["median"] / contender.devices
    data["epoch_seconds"] = trained.samples_in_epoch / data["samples_per_second"]["median"]
    return data


def speeds_of(timings: Sequence[Timing], base: Sequence[Timing]) -> dict[str, Any]:
    """Return the speed of trials, relative to those of the baseline in the same rounds, and the share of waits."""
    speeds = [timing.samples_per_second for timing in timings]
    speed_ups = [own / other.samples_per_second for own, other in zip(speeds, base, strict=True)]
    return {
        "samples_per_second": asdict(Spread.of(speeds)),
        "speed_up": asdict(Spread.of(speed_ups)),
        "data_share": statistics.median(timing.data_share for timing in timings),
    }


def show(data: dict[str, Any]) -> None:
    """Print a comparison."""
    console = Console()
    shown = table(data["ways"])
    # A table wrapped by the terminal is more legible than a truncated one.
    width = console.measure(shown, options=console.options.update(width=_MAX_WIDTH)).maximum
    Console(width=max(console.width, width)).print(shown)
    rounds = len(data["ways"][0]["rounds"])
    metric = first_metric(data["ways"])
    print(
        f"\nspeed-up    relative to one device in the same round: median of {rounds} ± half the interquartile range"
    )
    if not data["complete"]:
        print("stopped     before the end: these are the results so far")
    if metric is not None:
        print(f"{metric:<12}after {plural(data['epochs'], 'epoch')}")
    for absent in data["not_run"]:
        print(f"not run     {absent['name']} on {absent['devices']}: {absent['reason']}")


def first_metric(ways: Sequence[dict[str, Any]]) -> str | None:
    """Return the first metric of the recipe, or `loss` without metrics; None without evaluation."""
    values = ways[0]["evaluation"]
    names = (
        name for name in values if name not in ("loss", "samples") and not name.startswith("loss_")
    )
    return next(names, "loss" if values else None)


def table(ways: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per variant."""
    metric = first_metric(ways)
    is_peak = any(way["memory_peak_bytes"] is not None for way in ways)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    last = None
    for way in ways:
        memory = (
            way["memory_held_bytes"]
            if way["memory_peak_bytes"] is None
            else way["memory_peak_bytes"]
        )
        cells = {
            "devices": str(way["devices"]) if way["devices"] != last else "",
            "variant": way["name"],
            **_speed_cells(way),
            "waits for data": f"{way['data_share'] or 0:.0%}",
            "peak MiB" if is_peak else "MiB held": f"{memory / 2**20:,.1f}",
        }
        if metric is not None:
            cells[metric] = format_metric(metric, way["evaluation"][metric])
        if not shown.columns:
            for name in cells:
                shown.add_column(
                    name,
                    justify="left" if name == "variant" else "right",
                    no_wrap=name != "devices",
                )
        shown.add_row(*cells.values())
        last = way["devices"]
    return shown


def _speed_cells(way: dict[str, Any]) -> dict[str, str]:
    if way["speed_up"] is None:  # interrupted before a measurement
        return dict.fromkeys(("samples/s", "epoch", "speed-up", "efficiency"), "-")
    return {
        "samples/s": f"{way['samples_per_second']['median']:,.0f}",
        "epoch": f"{way['epoch_seconds']:.3g} s",
        "speed-up": Spread(**way["speed_up"]).format(".2f"),
        "efficiency": f"{way['efficiency']:.0%}",
    }


# --- loader processes ---


def compare_workers(
    recipe: Recipe,
    counts: Sequence[int],
    devices: Sequence[int],
    plan: Plan,
    report: Callable[[str], None],
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


def _row(
    devices: int, count: int, position: int, rounds: Sequence[Sequence[Timing]]
) -> dict[str, Any]:
    timings = [timings[position] for timings in rounds]
    speeds = speeds_of(timings, [timings[0] for timings in rounds])
    return {
        "devices": devices,
        "workers": count,
        **speeds,
        "rounds": [asdict(timing) for timing in timings],
    }


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
