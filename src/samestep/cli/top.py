"""`samestep top`: live view of a run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from samestep.cli.options import JsonOption, argument, option
from samestep.errors import EXIT_DONE, InputError, printable
from samestep.loggers.logger import format_metric
from samestep.tools.run_log import parse_finite
from samestep.tools.top import RunStatus, read_status
from samestep.units import format_bytes

_SECONDS = 1.0  # between updates
_STYLES = {"silent": "yellow", "gone": "bold red", "missing": "yellow"}
# Title, format and keys in a rank's line of each column.
_COLUMNS = (
    ("step", "{:,.0f}".format, ("step",)),
    ("samples/s", "{:,.0f}".format, ("samples_per_second",)),
    ("data", "{:.0%}".format, ("data_share",)),
    ("wait", "{:.0%}".format, ("wait_share",)),
    ("CPU", "{:.0f}%".format, ("cpu_percent",)),
    ("memory", format_bytes, ("memory_bytes",)),
    ("GPU", "{:.0f}%".format, ("gpu", "use_percent")),
    ("GPU memory", format_bytes, ("gpu", "memory_bytes")),
)


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    """Show the state of each rank of a run, read from the run's directory: before, during and after the run.

    Ctrl-C ends the view. Without a terminal, the state is printed once.
    """

    example: ClassVar = "samestep top runs/first --once"

    folder: Path = argument("RUN", "directory of the run")
    once: bool = option("print the state once and exit", default=False)


def run(options: Options) -> int:
    """Show the run once, or until Ctrl-C."""
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal and not (options.json or options.once):
        _follow(options.folder, console)
        return EXIT_DONE
    status = read_status(options.folder)
    if status is None:
        expected = "a run directory, which contains recipe.yaml"
        raise InputError(
            f"{options.folder} is not a run", expected, "check the path", code="E_NOT_A_RUN"
        )
    if options.json:
        options.result({"run": str(options.folder), **asdict(status)})
    else:
        console.print(render(options.folder, status))
    return EXIT_DONE


def _follow(folder: Path, console: Console) -> None:
    """Update the view until Ctrl-C."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                status = read_status(folder)
                view = Text(f"waiting for {folder}") if status is None else render(folder, status)
                live.update(view, refresh=True)
                time.sleep(_SECONDS)
        except KeyboardInterrupt:
            return


def render(folder: Path, status: RunStatus) -> RenderableType:
    """Return the state, progress and values of a run, and one row per rank."""
    parts = [f"{printable(str(folder))}  {status.state}"]
    if status.epoch or status.epochs:
        parts.append(f"epoch {status.epoch}/{status.epochs or '?'}")
    parts.append(f"step {status.step:,}" + (f"/{status.steps:,}" if status.steps else ""))
    if status.loss is not None:
        parts.append(
            f"loss {status.loss if isinstance(status.loss, str) else format_metric('loss', status.loss)}"
        )
    if status.failure:
        parts.append(f"{status.failure['text']} [{status.failure['code']}]")
    table = Table(box=None, pad_edge=False, header_style="dim")
    cells = [[_cell(row.line, keys, form) for _, form, keys in _COLUMNS] for row in status.ranks]
    used = [number for number in range(len(_COLUMNS)) if any(row[number] != "-" for row in cells)]
    for title in ("rank", *(_COLUMNS[number][0] for number in used), "age"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("activity")  # the only column that shrinks
    for row, values_of_rank in zip(status.ranks, cells, strict=True):
        age = "not yet" if row.age_seconds is None else f"{row.age_seconds:.0f} s"
        sign = "" if row.sign == "active" else f"{row.sign} "
        texts = [str(row.rank), *(values_of_rank[number] for number in used), sign + age]
        activity = Text(str(row.line.get("doing", "-")), no_wrap=True, overflow="ellipsis")
        table.add_row(*texts, activity, style=_STYLES.get(row.sign, ""))
    return Group(Text("  ".join(parts)), table)


def _cell(line: Any, keys: tuple[str, ...], form: Any) -> str:
    for key in keys:
        line = line.get(key) if isinstance(line, dict) else None
    value = parse_finite(line)
    if value is None:
        return "-"
    return str(form(value))
