"""A picture of a run for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from io import StringIO
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from samestep.record.values import shown
from samestep.tools.top.picture import Picture, RankRow

_STATES = {"running": "green", "ended": "green", "stopped": "yellow", "starting": "cyan", "dead": "bold red"}
_BAR_WIDTH = 24
_DOES_WIDTH, _GAP = 18, 2
_BESIDE_RANKS = 7  # lines of a picture that are not rows of ranks
_SIGNS = {"silent": "bold yellow", "gone": "bold red", "not heard": "yellow"}


class _Column(NamedTuple):
    """One number of each rank; where there is little room, those of the largest `rest` go first."""

    title: str
    cell: Callable[[RankRow], str]
    rest: int
    is_for_gpus: bool = False


def _number(key: str, form: str) -> Callable[[RankRow], str]:
    return lambda row: _formed(row.line.get(key), form)


def _of_gpu(key: str, form: str) -> Callable[[RankRow], str]:
    return lambda row: _formed((row.line.get("gpu") or {}).get(key), form)


def _formed(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return decimal(int(value)) if form == "bytes" else format(value, form)


_COLUMNS = (
    _Column("rank", lambda row: str(row.rank), 0),
    _Column("step", _number("step", ","), 1),
    _Column("samples/s", _number("samples_per_second", ",.0f"), 2),
    _Column("data", _number("data_share", ".0%"), 4),
    _Column("others", _number("wait_share", ".0%"), 5),
    _Column("CPU", lambda row: _percent(row.line.get("cpu_percent")), 7),
    _Column("memory", _number("memory_bytes", "bytes"), 8),
    _Column("GPU", lambda row: _percent((row.line.get("gpu") or {}).get("use_percent")), 3, is_for_gpus=True),
    _Column("GPU memory", _of_gpu("memory_bytes", "bytes"), 6, is_for_gpus=True),
    _Column("°C", _of_gpu("temperature_c", ".0f"), 9, is_for_gpus=True),
)


def drawn(picture: Picture, width: int, height: int | None = None) -> RenderableType:
    """The run's line, its progress, its numbers, and a row a rank.

    Args:
        width: columns of the terminal; in few, some numbers are left out.
        height: lines there are; with more ranks than fit, those that something is wrong with come first.
    """
    parts: list[RenderableType] = [
        _head(picture),
        _progress(picture),
        _numbers(picture),
        _table(picture, width, height),
    ]
    hidden = len(picture.ranks) - len(_fitting(picture.ranks, height))
    if hidden:
        parts.append(Text(f"and {hidden} more", style="dim"))
    if picture.unreadable_lines:
        parts.append(Text(f"{picture.unreadable_lines} lines cannot be read", style="yellow"))
    return Group(*parts)


def svg(picture: Picture, width: int) -> str:
    """The picture as an SVG, which loads nothing."""
    # Rich's own template asks a server for a font.
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(drawn(picture, width))
    made = console.export_svg(title=f"samestep top {picture.run}", theme=SVG_EXPORT_THEME)
    return re.sub(r"@font-face \{.*?\}", "", made, flags=re.DOTALL)


def _head(picture: Picture) -> Text:
    text = Text.assemble((picture.run, "bold"), "  ", (picture.state, _STATES[picture.state]))
    if picture.state == "dead":
        text.append("  no process holds it, and it has told no end")
    lost = [row.rank for row in picture.ranks if row.sign == "gone"]
    if lost and picture.state == "running":
        text.append(f"  lost: {', '.join(map(str, lost))}", style="bold red")
    return text


def _progress(picture: Picture) -> Table:
    line = Table.grid(padding=(0, 2))
    for is_bar in (False, True, False, False, False):
        line.add_column(no_wrap=not is_bar)  # the bar gives way
    left = "" if picture.seconds_left is None else f"{timedelta(seconds=round(picture.seconds_left))} left"
    of = f" of {picture.steps:,}" if picture.steps else ""
    line.add_row(
        f"epoch {picture.epoch}/{picture.epochs}",
        ProgressBar(total=1.0, completed=picture.progress, width=_BAR_WIDTH),
        f"{picture.progress:.0%}",
        f"step {picture.step:,}{of}",
        left,
    )
    return line


def _numbers(picture: Picture) -> Text:
    parts = [] if picture.loss is None else [f"loss {_value('loss', picture.loss)}"]
    values = picture.evaluation
    if values:
        told = "  ".join(f"{name} {_value(name, value)}" for name, value in values.items() if name != "epoch")
        parts.append(f"evaluation {values.get('epoch')}: {told}")
    return Text("   ".join(parts) or "no step yet", overflow="ellipsis", no_wrap=True)


def _table(picture: Picture, width: int, height: int | None) -> Table:
    rows = _fitting(picture.ranks, height)
    columns = _chosen(rows, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim", expand=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("does", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("heard", justify="right", no_wrap=True)
    for row in rows:
        cells = [column.cell(row) for column in columns]
        table.add_row(*cells, Text(str(row.line.get("doing", "-"))), _sign(row), style=_SIGNS.get(row.sign, ""))
    return table


def _chosen(rows: Sequence[RankRow], width: int) -> list[_Column]:
    """The columns that leave room for what ranks do."""
    has_gpus = any(row.line.get("gpu") for row in rows)
    columns = [column for column in _COLUMNS if has_gpus or not column.is_for_gpus]
    room = width - _DOES_WIDTH - max([len("heard"), *(len(_sign(row)) for row in rows)])
    taken = {column: max([len(column.title), *(len(column.cell(row)) for row in rows)]) + _GAP for column in columns}
    for column in sorted(columns, key=lambda column: column.rest, reverse=True):
        if sum(taken.values()) > room and column.rest:
            del taken[column]
    return list(taken)


def _fitting(ranks: Sequence[RankRow], height: int | None) -> list[RankRow]:
    room = len(ranks) if height is None else max(1, height - _BESIDE_RANKS)
    if len(ranks) <= room:
        return list(ranks)
    chosen = sorted(ranks, key=lambda row: (row.sign == "heard", row.rank))[:room]
    return sorted(chosen, key=lambda row: row.rank)


def _sign(row: RankRow) -> str:
    if row.age_seconds is None:
        return "not yet"
    age = f"{row.age_seconds:.0f} s" if row.age_seconds < 600 else str(timedelta(seconds=round(row.age_seconds)))
    return f"{row.sign} {age}" if row.sign in ("silent", "gone") else age


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _value(name: str, value: Any) -> str:
    return value if isinstance(value, str) else shown(name, value)
