"""`samestep bench`: variants of a recipe, each trained once, then all timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.table import Table

from samestep.config import Recipe, RunOptions, StrategyConfig, resolve_mesh
from samestep.distributed.logging import plain_console
from samestep.errors import InputError
from samestep.launcher.launch import RankError
from samestep.loggers.logger import format_metric
from samestep.number_text import plural
from samestep.report_text import printable
from samestep.tools.launch import run_on_ranks

SINGLE = "one device"
# Variants that `--ways` selects. The baseline, one device, and the layouts of `--layout` always
# belong to a comparison.
WAYS = ("ddp", "dp", "accumulate", "bf16", "exact", "local_bn", "compression")
DEVICES = (1, 2, 4)
ACCUMULATE = (4,)  # parts of a batch, by default
STEPS = 20  # of a trial, by default
WARMUP_STEPS = 3  # of a trial, which allocate memory and select kernels
_MAX_WIDTH = 200


@dataclass(frozen=True)
class Timing:
    """Means over some steps."""

    step_seconds: float  # time of a step, including the wait for its batch
    data_share: float  # part of that time spent waiting for batches
    samples_per_second: float  # over all ranks


@dataclass(frozen=True)
class Spread:
    """Median, first and third quartile."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:  # quantiles need two
            values = [*values, *values]
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)

    def __str__(self) -> str:
        return f"{self.median:.2f} ± {(self.q3 - self.q1) / 2:.2f}"


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


@dataclass(frozen=True)
class Trained:
    """Result of the training of a variant."""

    evaluation: dict[str, float]  # the loss and the metrics of the recipe
    peak: int | None  # peak GPU memory in bytes, of the rank with the most; None on a CPU
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
        """Run a function of `bench_worker` on all ranks."""
        return run_on_ranks(
            "samestep.tools.bench_worker",
            function,
            *arguments,
            self.options,
            processes=processes,
            preload=self.preload,
        )


def contenders(
    recipe: Recipe,
    devices: Sequence[int],
    strategies: Sequence[StrategyConfig],
    available: int | None,
    *,
    ways: Sequence[str] = WAYS,
    accumulate: Sequence[int] = ACCUMULATE,
) -> tuple[list[Contender], list[Absent]]:
    """Return the variants, one device first as the baseline, and those that cannot run.

    With None available devices, ranks can share a device, as on a CPU. `accumulate` has numbers of
    parts of a batch, each a variant.
    """
    selected = {None, *ways}
    if "accumulate" in ways and 1 in accumulate:
        selected.add("ddp")  # one part is the plain variant
    result: list[Contender] = []
    absent: list[Absent] = []
    for number in sorted({1, *devices}):
        for way, name, changes in _variants(number, strategies, accumulate):
            if way not in selected:
                continue
            reason = None
            if available is not None and number > available:
                reason = f"this machine has {plural(available, 'device')}"
            elif way == "dp" and available is None:
                reason = "torch's nn.DataParallel needs GPUs"
            else:
                try:
                    step = replace(recipe.step, **changes.pop("step", {}))
                    # Not the strategy of the recipe: a variant trains with the one of its name.
                    changed = replace(
                        recipe, **{"strategy": StrategyConfig(), "step": step, **changes}
                    )
                    # Before the first training: a variant without a mesh is listed with the reason.
                    resolve_mesh(changed.strategy, number, changed.microbatch_count)
                except InputError as error:
                    reason = error.value
            processes = 1 if way == "dp" else number
            if reason is None:
                result.append(Contender(name, processes, number, changed))
            else:
                absent.append(Absent(name, number, reason))
    return result, absent


def _variants(
    number: int, strategies: Sequence[StrategyConfig], accumulate: Sequence[int]
) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
    """Yield way, name and changed keys of the variants for a number of devices, the plain first.

    The baseline and the layouts have no way: they belong to every comparison.
    """
    prefix = ""
    if number == 1:
        yield None, SINGLE, {}
    else:
        prefix = "ddp, "
        yield "ddp", "ddp", {}
    for several in dict.fromkeys(accumulate):
        if several > 1:
            yield "accumulate", f"{prefix}{several} parts", {"accumulate": several}
    yield "bf16", f"{prefix}bf16", {"step": {"precision": "bf16"}}
    yield "exact", f"{prefix}exact", {"step": {"reduction": "exact"}}
    if number > 1:
        yield "dp", "nn.DataParallel", {}
        yield "local_bn", "ddp, local BN", {"step": {"batch_norm": "local"}}
        compressed = StrategyConfig(name="ddp", hook="bf16")
        yield "compression", "ddp, bf16 compression", {"strategy": compressed}
        for strategy in strategies:
            sizes = ", ".join(f"{axis} {size}" for axis, size in strategy.mesh.sizes.items())
            name: str = strategy.name
            if sizes:
                name = f"{name} ({sizes})"
            yield None, name, {"strategy": strategy}


def compare(
    contenders: Sequence[Contender],
    absent: Sequence[Absent],
    plan: Plan,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Train each variant once, then time all of them in turn; return the results as plain data.

    Every round contains all variants, those with equally many ranks in the same processes: a
    machine that becomes slower affects all variants alike. The first variant is the baseline.
    `report` receives messages.

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
            trained = plan.run(
                "train_contender", contender, plan.epochs, processes=contender.processes
            )
        except RankError as error:
            if not rows:  # without the baseline, there are no speed-ups
                raise
            failed.append(Absent(contender.name, contender.devices, str(error).splitlines()[0]))
        else:
            rows.append(Row(contender, trained))
    for number in range(plan.rounds):
        report(f"timing, round {number + 1} of {plan.rounds}")
        # In reverse every other round: a drift within the rounds would favour the first variants.
        _time_round(rows, plan, is_reversed=number % 2 == 1)
    return comparison_data(plan, rows, [*absent, *failed])


def _time_round(rows: Sequence[Row], plan: Plan, *, is_reversed: bool) -> None:
    # One launch for all variants with equally many ranks: its start takes seconds.
    for processes in sorted({row.contender.processes for row in rows}, reverse=is_reversed):
        group = [row for row in rows if row.contender.processes == processes]
        if is_reversed:
            group.reverse()
        variants = [row.contender for row in group]
        timings = plan.run("time_contenders", variants, plan.steps, processes=processes)
        for row, timing in zip(group, timings, strict=True):
            row.rounds.append(timing)


def comparison_data(plan: Plan, rows: Sequence[Row], absent: Sequence[Absent]) -> dict[str, Any]:
    """Return the results of all variants, with speeds relative to the first."""
    ways = []
    for row in rows:
        speeds = _speeds(row.rounds, rows[0].rounds)
        data = {
            "name": row.contender.name,
            "devices": row.contender.devices,
            "processes": row.contender.processes,
            "microbatches": row.contender.recipe.microbatches,
            **speeds,
            "efficiency": speeds["speed_up"]["median"] / row.contender.devices,
            "epoch_seconds": row.trained.samples_in_epoch / speeds["samples_per_second"]["median"],
            "memory_peak_bytes": row.trained.peak,
            "evaluation": row.trained.evaluation,
            "rounds": [asdict(timing) for timing in row.rounds],
        }
        ways.append(data)
    not_run = [asdict(variant) for variant in absent]
    return {"epochs": plan.epochs, "steps": plan.steps, "ways": ways, "not_run": not_run}


def _speeds(timings: Sequence[Timing], base: Sequence[Timing]) -> dict[str, Any]:
    """Return the speed, also relative to a baseline of the same rounds, and the share of waits."""
    speeds = [timing.samples_per_second for timing in timings]
    speed_ups = [own / other.samples_per_second for own, other in zip(speeds, base, strict=True)]
    return {
        "samples_per_second": asdict(Spread.of(speeds)),
        "speed_up": asdict(Spread.of(speed_ups)),
        "data_share": statistics.median(timing.data_share for timing in timings),
    }


def show(data: dict[str, Any]) -> None:
    """Print a comparison."""
    # A table wrapped by the terminal is more legible than a truncated one.
    plain_console(width=_MAX_WIDTH).print(table(data["ways"]))
    rounds = len(data["ways"][0]["rounds"])
    metric = first_metric(data["ways"])
    print(
        "\nspeed-up    relative to one device in the same round: "
        f"median of {rounds} ± half the interquartile range"
    )
    if metric is not None:
        print(f"{metric:<12}after {plural(data['epochs'], 'epoch')}")
    for absent in data["not_run"]:
        print(printable(f"not run     {absent['name']} on {absent['devices']}: {absent['reason']}"))


def first_metric(ways: Sequence[dict[str, Any]]) -> str | None:
    """Return the first metric of the recipe, or `loss` without metrics; None without evaluation."""
    values = ways[0]["evaluation"]
    for name in values:
        if name not in ("loss", "samples") and not name.startswith("loss_"):
            return str(name)
    return "loss" if values else None


def table(ways: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per variant."""
    metric = first_metric(ways)
    shown = Table(box=None, pad_edge=False, header_style="bold")
    last = None
    for way in ways:
        cells = {
            "devices": str(way["devices"]) if way["devices"] != last else "",
            "variant": printable(way["name"]),
            "samples/s": f"{way['samples_per_second']['median']:,.0f}",
            "epoch": f"{way['epoch_seconds']:.3g} s",
            "speed-up": str(Spread(**way["speed_up"])),
            "efficiency": f"{way['efficiency']:.0%}",
            "waits for data": f"{way['data_share']:.0%}",
        }
        if way["memory_peak_bytes"] is not None:
            cells["peak MiB"] = f"{way['memory_peak_bytes'] / 2**20:,.1f}"
        if metric is not None:
            cells[metric] = format_metric(metric, way["evaluation"][metric])
        if last is None:
            for name in cells:
                shown.add_column(name, justify="right", no_wrap=name != "devices")
            shown.columns[1].justify = "left"
        shown.add_row(*cells.values())
        last = way["devices"]
    return shown
