"""What was found, for people: a table and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samestep.tools.doctor.finding import size_text
from samestep.tools.timed import Spread
from samestep.tools.tune.memory import Memory
from samestep.tools.tune.rules import Tried
from samestep.tools.tune.search import Found
from samestep.tools.tune.setting import Setting
from samestep.tools.tune.tuning import Tuning

_WIDTH = 100


def show(tuning: Tuning, looked_at: int) -> None:
    """Print it.

    Args:
        looked_at: how many settings there were to choose from.
    """
    found = tuning.found
    if found is not None:
        console = Console()
        Console(width=max(console.width, _WIDTH)).print(table(found), "")
    for name, text in lines(tuning, looked_at):
        print(f"{name:<20}{text}")


def table(found: Found) -> Table:
    """A line a setting that had a turn."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("workers", "prefetch", "turns", "samples/s", "against the default", "waits for data"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for setting in found.settings:
        speed, times = found.speed(setting), found.against_default(setting)
        is_default = " (default)" if setting == found.default else ""
        shown.add_row(
            str(setting.workers),
            str(setting.prefetch) if setting.workers else "-",
            str(len(found.of(setting))),
            f"{speed.median:,.0f} ± {_half(speed):,.0f}",
            f"{times.median:.2f} ± {_half(times):.2f}",
            f"{found.data_share(setting):.0%}",
            f"{found.verdict(setting)}{is_default}",
        )
    return shown


def lines(tuning: Tuning, looked_at: int) -> Iterator[tuple[str, str]]:
    """What a table cannot say, each with its name."""
    yield "memory", _of_memory(tuning.memory)
    found = tuning.found
    if found is None or found.chosen is None:
        return
    many = f"{len(found.settings)} of {looked_at} settings, {found.turns} turns; {tuning.seconds:.0f} s in all"
    yield "looked at", f"{many}{f': {found.reason}' if found.reason else ''}"
    for setting, reason in tuning.absent.items():
        yield "not run", f"{setting}, nor more: {reason}"
    for tried in tuning.tried:
        yield str(tried.rule).removeprefix("step."), _of_rule(tried)
    times = found.against_default(found.chosen)
    gain = "the default" if found.chosen == found.default else f"{times.median:.2f} times as fast as {found.default}"
    yield "chosen", f"{found.chosen}: {gain}; no result depends on it"


def _of_memory(memory: Memory) -> str:
    within = f" in {size_text(memory.limit)}" if memory.limit is not None else ""
    shard = f"a shard of {memory.samples} samples"
    if memory.fits:
        return f"{shard} fits{within}; a rank took {size_text(memory.peak or 0)}"
    if memory.enough is None:
        return f"{shard} does not fit{within}, nor does one of a single sample: {memory.said}"
    changes = " and ".join(memory.changes) or "nothing but the last bits"
    return f"{shard} does not fit{within}; with shards: {memory.enough} it would. That changes: {changes}"


def _of_rule(tried: Tried) -> str:
    if tried.times is None:
        return f"cannot run here: {tried.reason}"
    text = f"steps {tried.times.median:.2f} ± {_half(tried.times):.2f} times as fast"
    return f"{text}; it changes bits, so it is yours to set: --set {tried.rule}" if tried.is_worth_it else text


def _half(spread: Spread) -> float:
    return (spread.q3 - spread.q1) / 2


def draw(found: Found, title: str, path: Path) -> None:
    """Write a PNG: samples a second over workers with the spread over turns, a line for each prefetch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, prefetch in enumerate(sorted({setting.prefetch for setting in found.settings})):
        row = [setting for setting in found.settings if setting.prefetch == prefetch]
        speeds = [found.speed(setting) for setting in row]
        reach = [[each.median - each.q1 for each in speeds], [each.q3 - each.median for each in speeds]]
        colour = _COLOURS[number % len(_COLOURS)]
        medians = [each.median for each in speeds]
        axes.errorbar(
            [s.workers for s in row],
            medians,
            yerr=reach,
            color=colour,
            marker="o",
            markersize=4,
            capsize=3,
            linewidth=1,
            label=f"prefetch {prefetch}",
        )
    assert found.chosen is not None
    for setting, name, place in _named(found):
        axes.annotate(
            name,
            (setting.workers, found.speed(setting).median),
            xytext=(0, place),
            fontsize=8,
            textcoords="offset points",
            ha="center",
        )
    axes.set_xticks(sorted({setting.workers for setting in found.settings}))
    axes.set_ylim(0, 1.15 * max(found.speed(setting).q3 for setting in found.settings))  # room for names
    axes.set_xlabel("loader workers a rank")
    axes.set_ylabel("samples/s")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _named(found: Found) -> Iterator[tuple[Setting, str, int]]:
    """Settings that are pointed out, and how far from their mark."""
    assert found.chosen is not None
    if found.chosen == found.default:
        yield found.chosen, "chosen, the default", 10
    else:
        yield found.chosen, "chosen", 10
        yield found.default, "default", -16


# Okabe and Ito's, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
