"""`samestep tune`: memory check, search of loader settings, shares of ranks, options of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.config import Recipe, RunOptions
from samestep.config.strategy import resolve_mesh
from samestep.launcher.launch import RankError
from samestep.microbatches import owned_microbatches
from samestep.tools.bench import COLORS, Contender
from samestep.tools.timing import Spread, Timing, run_trial
from samestep.tools.tune.memory_check import Inspection, check_memory
from samestep.tools.tune.search import SearchResult
from samestep.tools.tune.settings import CHANNELS_LAST, COMPILE, GRAPHS, THREADS, Setting, TuneTarget
from samestep.units import format_bytes

_TRIALS = "samestep.tools.trials"
_WORTHWHILE_SPEED_UP = 1.03
_WIDTH = 100
WORTHWHILE = 1.05  # least speed-up of a proposal, predicted and measured
_STEPS = 6  # of each trial


@dataclass(frozen=True)
class StepOption:
    """Other value of a key of the recipe, such as `step.threads`."""

    key: str
    value: Any
    reason: str = ""  # why the speed with this value cannot be measured, if so

    @property
    def changes_bits(self) -> bool:
        """Whether results depend on the value."""
        return self.key != "step.cuda_graphs"

    def __str__(self) -> str:
        return f"{self.key}={str(self.value).lower()}"

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this value."""
        return replace(recipe, step=replace(recipe.step, **{self.key.removeprefix("step."): self.value}))


def step_options(
    recipe: Recipe, inspection: Inspection, names: Sequence[str], cores: int, processes: int
) -> Iterator[StepOption]:
    """Yield the options to measure, and with a reason those that cannot be measured on these cores of all ranks."""
    if THREADS in names:
        available = cores // processes
        counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= available and count != recipe.step.threads]
        if inspection.device != "cpu":
            yield StepOption("step.threads", available, reason="GPUs compute the steps")
        elif not counts:
            yield StepOption("step.threads", 2, reason=f"{processes} ranks on {cores} cores leave no core to spare")
        else:
            yield from (StepOption("step.threads", count) for count in counts)
    if CHANNELS_LAST in names:
        reason = "" if inspection.has_images else "no input has the four dimensions of images"
        yield StepOption("step.channels_last", not recipe.step.channels_last, reason=reason)
    if COMPILE in names:
        yield StepOption("step.compile", not recipe.step.compile)
    if GRAPHS in names:
        reason = "" if inspection.device != "cpu" else "CUDA graphs need a GPU"
        yield StepOption("step.cuda_graphs", "auto" if recipe.step.cuda_graphs == "off" else "off", reason=reason)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Configuration of a tuning."""

    settings: Sequence[Setting]  # candidates of the search
    step_options: Sequence[str]
    memory: int | None  # memory limit of a rank in bytes; None for no limit
    seconds: float  # approximate duration of a trial
    rounds: int  # number of rounds for each step option
    options: RunOptions
    preload: tuple[str, ...]
    environment: Mapping[str, str] | None = None


def tune(
    target: TuneTarget, recipe: Recipe, config: TuneConfig, machine: dict[str, Any], report: Callable[[str], None]
) -> dict[str, Any]:
    """Check memory, search the fastest loader setting, and measure step options; return plain data.

    There is neither a search nor a measurement if the microbatches do not fit into memory.

    Args:
        target: recipe, machine and number of ranks.
        recipe: recipe of the trials.
        config: settings, step options and limits.
        machine: result of `describe_machine` before the load of the trials.
        report: receives progress messages.

    Raises:
        RankError: the recipe cannot run.
        StoppedError: a stop was requested.
    """
    began = time.perf_counter()
    run = partial(
        run_trial, _TRIALS, processes=target.processes, preload=config.preload, environment=config.environment
    )
    memory, inspection = check_memory(
        recipe, config.memory, lambda variant: run("inspect_recipe", variant, config.options, config.memory), report
    )
    rules: list[dict[str, Any]] = []
    searched: dict[str, Any] = {}
    if inspection is not None:
        report("workers and prefetch:")
        searched = _search(recipe, config, Setting(inspection.workers), run)
        choice = searched["choice"]
        options = replace(config.options, workers=choice["workers"], prefetch=choice["prefetch"])
        searched["shares"] = propose_shares(recipe, target.processes, options, config.rounds, run, report)
        for option in step_options(recipe, inspection, config.step_options, machine["cores"], target.processes):
            if not option.reason:
                report(f"effect of {option}{', which changes bits' if option.changes_bits else ''}")
            rules.append(_measure_option(recipe, option, config, run))
    seconds = time.perf_counter() - began
    first = {"place": asdict(target), "machine": machine, "memory": memory, "seconds": seconds, "rules": rules}
    return {**first, **searched}


def _search(recipe: Recipe, config: TuneConfig, default: Setting, run: Callable[..., Any]) -> dict[str, Any]:
    """Search without settings that make a rank fail, and without settings with as many workers."""
    settings = list(config.settings)
    failed: list[dict[str, Any]] = []
    while True:
        try:
            result: SearchResult = run("search_settings", recipe, config.options, settings, default, config.seconds)
            return {**result.to_dict(), "not_run": failed}
        except RankError as error:
            activity = error.failure.activity
            cause = next((s for s in settings if s.workers and f"trial of {s}" in activity), None)
            if cause is None:
                raise
            failed.append({**asdict(cause), "reason": str(error).splitlines()[0]})
            settings = [setting for setting in settings if setting.workers < cause.workers]
            default = default if default.workers < cause.workers else Setting(0)
            if not settings:
                raise


def _measure_option(recipe: Recipe, option: StepOption, config: TuneConfig, run: Callable[..., Any]) -> dict[str, Any]:
    speed, reason = None, option.reason
    if not reason:
        try:
            ratios = run("compare_recipes", recipe, option.apply(recipe), config.options, config.rounds, config.seconds)
            speed = asdict(Spread.of(ratios))
        except RankError as error:
            reason = str(error).splitlines()[0]
    return {"key": option.key, "value": option.value, "times_as_fast": speed, "reason": reason}


def show(data: dict[str, Any], candidates: int) -> None:
    """Print the result of a tuning with `candidates` settings in the grid."""
    if "choice" in data:
        Console(width=max(Console().width, _WIDTH)).print(table(data), "")
    for name, text in lines(data, candidates):
        print(f"{name:<20}{text}")


def table(data: dict[str, Any]) -> Table:
    """Return a table with a row per setting."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("workers", "prefetch", "trials", "samples/s", "vs. default", "waits for data"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for row in data["settings"]:
        is_default = _setting(row) == _setting(data["default"])
        shown.add_row(
            str(row["workers"]),
            str(row["prefetch"]) if row["workers"] else "-",
            str(len(row["turns"])),
            Spread(**row["samples_per_second"]).format(",.0f"),
            Spread(**row["against_default"]).format(".2f"),
            f"{row['data_share']:.0%}",
            row["verdict"] + (" (default)" if is_default else ""),
        )
    return shown


def lines(data: dict[str, Any], candidates: int) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the other results."""
    yield "memory", _memory_text(data["memory"])
    if "choice" not in data:
        return
    count = f"{len(data['settings'])} of {candidates} settings, {data['turns']} trials in {data['seconds']:.0f} s"
    yield "measured", f"{count}: {data['reason']}" if data["reason"] else count
    for absent in data["not_run"]:
        yield "not run", f"{_setting(absent)}, and more workers: {absent['reason']}"
    for rule in data["rules"]:
        option = StepOption(rule["key"], rule["value"])
        yield str(option).removeprefix("step."), _option_text(option, rule)
    if data["place"]["processes"] > 1:
        yield "shares", shares_text(data["shares"])
    chosen, default = _setting(data["choice"]), _setting(data["default"])
    ratio = next(row["against_default"]["median"] for row in data["settings"] if _setting(row) == chosen)
    gain = "the default" if chosen == default else f"{ratio:.2f} times as fast as {default}"
    yield "chosen", f"{chosen}: {gain}; no result depends on it"


def _setting(data: dict[str, Any]) -> Setting:
    return Setting(data["workers"], data["prefetch"])


def _memory_text(memory: dict[str, Any]) -> str:
    limit = f" in {format_bytes(memory['limit_bytes'])}" if memory["limit_bytes"] is not None else ""
    microbatch, enough = f"a microbatch of {memory['samples_in_a_microbatch']} samples", memory["microbatches_that_fit"]
    if memory["fits"]:
        return f"{microbatch} fits{limit}; a rank used {format_bytes(memory['peak_bytes'])}"
    if enough is None:
        return f"{microbatch} does not fit{limit}, and one of a single sample does not either: {memory['message']}"
    changes = " and ".join(memory["changes"]) or "nothing but rounding"
    return f"{microbatch} does not fit{limit}; microbatches: {enough} would fit, and would change: {changes}"


def _option_text(option: StepOption, rule: dict[str, Any]) -> str:
    if rule["times_as_fast"] is None:
        return f"cannot run here: {rule['reason']}"
    speed = Spread(**rule["times_as_fast"])
    text = f"{speed.format('.2f')} times as fast"
    # Worthwhile only if faster by more than the spread of rounds.
    if speed.median > _WORTHWHILE_SPEED_UP and speed.q1 > 1:
        effect = "changes bits, so not set automatically" if option.changes_bits else "no result depends on it"
        text += f"; {effect}: --set {option}"
    return text


def draw(data: dict[str, Any], title: str, path: Path) -> None:
    """Write a PNG: samples per second over workers with the spread over trials, one line per prefetch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    speeds = {_setting(row): Spread(**row["samples_per_second"]) for row in data["settings"]}
    for number, prefetch in enumerate(sorted({setting.prefetch for setting in speeds})):
        line = {setting: speed for setting, speed in speeds.items() if setting.prefetch == prefetch}
        axes.errorbar(
            [setting.workers for setting in line],
            [speed.median for speed in line.values()],
            yerr=[[s.median - s.q1 for s in line.values()], [s.q3 - s.median for s in line.values()]],
            color=COLORS[number % len(COLORS)],
            label=f"prefetch {prefetch}",
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1,
        )
    chosen, default = _setting(data["choice"]), _setting(data["default"])
    labels = {default: ("default", -16), chosen: ("chosen", 10)}
    if chosen == default:
        labels = {chosen: ("chosen, the default", 10)}
    for setting, (text, offset) in labels.items():
        point = setting.workers, speeds[setting].median
        axes.annotate(text, point, xytext=(0, offset), fontsize=8, textcoords="offset points", ha="center")
    axes.set_xticks(sorted({setting.workers for setting in speeds}))
    axes.set_ylim(0, 1.15 * max(speed.q3 for speed in speeds.values()))  # leaves space for labels
    axes.set_xlabel("loader workers per rank")
    axes.set_ylabel("samples/s")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def divide(microbatches: int, speeds: Sequence[float]) -> list[int]:
    """Return the number of microbatches of each rank, at least one, for which the slowest rank ends first.

    Args:
        microbatches: number of microbatches, at least one per rank.
        speeds: microbatches per second of each rank.
    """
    counts = [1] * len(speeds)
    for _ in range(microbatches - len(speeds)):
        # Greedy assignment is optimal for equal tasks on machines of different speeds.
        rank = min(range(len(speeds)), key=lambda number: ((counts[number] + 1) / speeds[number], counts[number]))
        counts[rank] += 1
    return counts


def step_seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the time after which the last rank has computed its microbatches."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


def format_shares(shares: Sequence[int]) -> str:
    """Return shares as the command line reads them."""
    return ",".join(map(str, shares))


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
    if recipe.strategy.shares:
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
