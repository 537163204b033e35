"""Rendering of a run's state for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from io import StringIO
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from samestep.loggers.logger import format_metric
from samestep.tools.run_lines import parse_finite
from samestep.tools.top.run_status import RankRow, RunStatus
from samestep.units import format_bytes

_STATE_STYLES = {
    "running": "green",
    "ended": "green",
    "stopped": "yellow",
    "starting": "cyan",
    "failed": "bold red",
    "dead": "bold red",
}
_SIGN_STYLES = {"silent": "bold yellow", "gone": "bold red", "missing": "yellow"}
_BAR_WIDTH, _ACTIVITY_WIDTH, _GAP = 24, 18, 2
_OTHER_LINES = 7  # lines that are not rows of ranks


class _Column(NamedTuple):
    """Value of each rank; a narrow terminal omits the columns with the highest `order` first."""

    title: str
    key: str
    format: Callable[[Any], str]
    order: int
    is_gpu: bool = False

    def cell(self, row: RankRow) -> str:
        values = row.line.get("gpu") or {} if self.is_gpu else {"rank": row.rank, **row.line}
        value = values.get(self.key) if isinstance(values, dict) else None
        return "-" if parse_finite(value) is None else self.format(value)


_COLUMNS = (
    _Column("rank", "rank", str, 0),
    _Column("step", "step", "{:,}".format, 1),
    _Column("samples/s", "samples_per_second", "{:,.0f}".format, 2),
    _Column("data", "data_share", "{:.0%}".format, 4),
    _Column("wait", "wait_share", "{:.0%}".format, 5),
    _Column("CPU", "cpu_percent", "{:.0f}%".format, 7),
    _Column("memory", "memory_bytes", format_bytes, 8),
    _Column("GPU", "use_percent", "{:.0f}%".format, 3, is_gpu=True),
    _Column("GPU memory", "memory_bytes", format_bytes, 6, is_gpu=True),
    _Column("°C", "temperature_c", "{:.0f}".format, 9, is_gpu=True),
)


def render(status: RunStatus, width: int, height: int | None = None) -> RenderableType:
    """Return the state, progress and values of a run, and one row per rank.

    A narrow terminal omits some values; with too few lines, ranks that are not active have priority.
    """
    rows = _visible_ranks(status.ranks, height)
    parts: list[RenderableType] = [_head(status), _progress(status), _values(status), _table(rows, width)]
    if len(rows) < len(status.ranks):
        parts.append(Text(f"and {len(status.ranks) - len(rows)} more", style="dim"))
    if status.unreadable_lines:
        parts.append(Text(f"{status.unreadable_lines} unreadable lines", style="yellow"))
    return Group(*parts)


def render_svg(status: RunStatus, width: int) -> str:
    """Return the state as an SVG without external resources."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(status, width))
    svg = console.export_svg(title=f"samestep top {status.run}", theme=SVG_EXPORT_THEME)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # rich refers to a font on a server


def _head(status: RunStatus) -> Text:
    text = Text.assemble((status.run, "bold"), "  ", (status.state, _STATE_STYLES[status.state]))
    if status.state == "dead":
        text.append("  no process holds the lock, and no end is logged")
    if status.failure is not None:
        text.append(f"  {status.failure['text']} [{status.failure['code']}]")
    lost = [str(row.rank) for row in status.ranks if row.sign == "gone"]
    if lost and status.state == "running":
        text.append(f"  lost: {', '.join(lost)}", style="bold red")
    return text


def _progress(status: RunStatus) -> Table:
    line = Table.grid(padding=(0, 2))
    for is_bar in (False, True, False, False, False):
        line.add_column(no_wrap=not is_bar)  # only the bar shrinks
    epoch = f"epoch {status.epoch}" if status.epoch or status.epochs is not None else ""
    line.add_row(
        epoch if status.epochs is None else f"{epoch}/{status.epochs}",
        ProgressBar(total=1.0, completed=status.progress, width=_BAR_WIDTH) if status.steps or status.epochs else "",
        f"{status.progress:.0%}" if status.steps or status.epochs else "",
        f"step {status.step:,}" + (f" of {status.steps:,}" if status.steps else ""),
        "" if status.seconds_left is None else f"{timedelta(seconds=round(status.seconds_left))} left",
    )
    return line


def _values(status: RunStatus) -> Text:
    def named(name: str, value: Any) -> str:
        return f"{name} {value if isinstance(value, str) else format_metric(name, value)}"

    parts = [] if status.loss is None else [named("loss", status.loss)]
    if status.evaluation:
        values = [named(name, value) for name, value in status.evaluation.items() if name != "epoch"]
        epoch = status.evaluation.get("epoch")
        parts.append(f"evaluation{'' if epoch is None else f' {epoch}'}: {'  '.join(values)}")
    return Text("   ".join(parts) or "no step yet", overflow="ellipsis", no_wrap=True)


def _table(rows: Sequence[RankRow], width: int) -> Table:
    columns = _visible_columns(rows, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", expand=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("activity", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("age", justify="right", no_wrap=True)
    for row in rows:
        cells = [column.cell(row) for column in columns]
        style = _SIGN_STYLES.get(row.sign, "")
        table.add_row(*cells, Text(str(row.line.get("doing", "-"))), _age(row), style=style)
    return table


def _visible_columns(rows: Sequence[RankRow], width: int) -> list[_Column]:
    """Return the columns that fit next to activity and age."""
    has_gpus = any(row.line.get("gpu") for row in rows)
    columns = [column for column in _COLUMNS if has_gpus or not column.is_gpu]
    available = width - _ACTIVITY_WIDTH - max([len("age"), *(len(_age(row)) for row in rows)])
    widths = {column: max([len(column.title), *(len(column.cell(row)) for row in rows)]) + _GAP for column in columns}
    for column in sorted(columns, key=lambda column: column.order, reverse=True):
        if sum(widths.values()) > available and column.order:
            del widths[column]
    return list(widths)


def _visible_ranks(ranks: Sequence[RankRow], height: int | None) -> list[RankRow]:
    count = len(ranks) if height is None else max(1, height - _OTHER_LINES)
    chosen = sorted(ranks, key=lambda row: (row.sign == "active", row.rank))[:count]
    return sorted(chosen, key=lambda row: row.rank)


def _age(row: RankRow) -> str:
    if row.age_seconds is None:
        return "not yet"
    age = f"{row.age_seconds:.0f} s" if row.age_seconds < 600 else str(timedelta(seconds=round(row.age_seconds)))
    return f"{row.sign} {age}" if row.sign in ("silent", "gone") else age
