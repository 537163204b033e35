"""A comparison for people: a table and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from samestep.tools.bench.comparison import Comparison, Row

_WIDEST = 200
_WORTH_TELLING = 0.05  # of a step


def show(found: Comparison) -> None:
    """Print a comparison."""
    console, lines = Console(), table(found)
    # A table that is cut off says less than one that is folded by the terminal.
    width = console.measure(lines, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(console.width, width)).print(lines)
    rounds, epochs = found.plan.rounds, found.plan.epochs
    print(f"\nspeed-up    against one device in the same round: median of {rounds} ± half of what is between quartiles")
    if found.metric is not None:
        print(f"{found.metric:<12}after {epochs} epoch{'s' if epochs > 1 else ''}")
    for each in found.absent:
        print(f"not run     {each.name} on {each.devices}: {each.reason}")


def table(found: Comparison) -> Table:
    """A line a contender."""
    rows = found.rows
    is_peak = any(row.reached.peak is not None for row in rows)
    lines = Table(box=None, pad_edge=False, header_style="bold")
    lines.add_column("devices", justify="right")
    lines.add_column("way", no_wrap=True)
    for name in ("samples/s", "epoch", "speed-up", "efficiency", "peak MiB" if is_peak else "MiB held"):
        lines.add_column(name, justify="right", no_wrap=True)
    waits = any(row.data_share > _WORTH_TELLING for row in rows)
    if waits:
        lines.add_column("waits for data", justify="right")
    if found.metric is not None:
        lines.add_column(found.metric, justify="right", no_wrap=True)
    last = None
    for row in rows:
        devices = row.contender.devices
        cells = _cells(row, found.metric, waits=waits)
        lines.add_row(str(devices) if devices != last else "", *cells)
        last = devices
    return lines


def _cells(row: Row, metric: str | None, *, waits: bool) -> list[str]:
    reached, speed_up = row.reached, row.speed_up
    memory = reached.held if reached.peak is None else reached.peak
    cells = [
        row.contender.name,
        f"{row.speed.median:,.0f}",
        f"{row.epoch_seconds:.3g} s",
        f"{speed_up.median:.2f} ± {(speed_up.q3 - speed_up.q1) / 2:.2f}",
        f"{row.efficiency:.0%}",
        f"{memory / 2**20:,.1f}",
    ]
    if waits:
        cells.append(f"{row.data_share:.0%}")
    if metric is not None:
        value = reached.evaluation[metric]
        cells.append(f"{value:.4f}" if metric == "loss" else f"{value:.2%}")
    return cells


def draw(found: Comparison, path: Path) -> None:
    """Write a PNG: a bar a contender, as long as it is faster than one device, with the spread over rounds."""
    from matplotlib.figure import Figure

    rows = found.rows
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    numbers = sorted({row.contender.devices for row in rows})
    colours = dict(zip(numbers, _COLOURS * len(numbers), strict=False))
    for place, row in enumerate(rows):
        spread, colour = row.speed_up, colours[row.contender.devices]
        reach = [[spread.median - spread.q1], [spread.q3 - spread.median]]
        axes.barh(place, spread.median, color=colour, xerr=reach, ecolor="#444444", capsize=2)
        axes.text(spread.q3 + 0.02, place, f"{row.speed.median:,.0f} samples/s", va="center", fontsize=7)
    names = [f"{row.contender.name}  ({row.contender.devices})" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlabel("times the samples/s of one device; in brackets the number of devices")
    axes.set_title(f"{found.name} on {found.machine['device']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


# Okabe and Ito's, which colour-blind people can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
