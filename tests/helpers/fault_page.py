"""Tables of docs/reference/faults.md, written by the fault tests: faults in a run, then one table per area."""

from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

PAGE = Path(__file__).parents[2] / "docs/reference/faults.md"
_HEAD = "| fault | result |"


@dataclass(frozen=True)
class Row:
    """Row of the table: one fault."""

    fault: str
    observed: str


def write_page(rows: list[Row]) -> None:
    """Replace the first table of the page, of faults in a run; the text around the table is unchanged."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start, end = _table(lines, 0)
    _write(lines[:start] + _table_lines(rows) + lines[end:])


def read_rows(text: str) -> list[Row]:
    """Return the rows of the first table in the text of a page."""
    return _rows(text.splitlines(), 0)


def write_area(area: str, rows: list[Row]) -> None:
    """Replace the table below the heading of an area; a new heading is appended to the page."""
    with FileLock(PAGE.with_suffix(".lock")):
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        heading = _heading(area)
        if heading in lines:
            start, end = _table(lines, lines.index(heading))
            _write(lines[:start] + _table_lines(rows) + lines[end:])
        else:
            _write([*lines, "", heading, "", *_table_lines(rows)])
    PAGE.with_suffix(".lock").unlink(missing_ok=True)


def area_rows(text: str, area: str) -> list[Row]:
    """Return the rows of an area in the text of a page; empty if the page has no such area."""
    lines = text.splitlines()
    heading = _heading(area)
    return _rows(lines, lines.index(heading)) if heading in lines else []


def _heading(area: str) -> str:
    return "## " + area.replace("_", " ").capitalize()


def _table(lines: list[str], start: int) -> tuple[int, int]:
    """Return the lines of the first table at or after line `start`, as `[first, end)`."""
    first = lines.index(_HEAD, start)
    end = next((number for number in range(first, len(lines)) if not lines[number].startswith("|")), len(lines))
    return first, end


def _rows(lines: list[str], start: int) -> list[Row]:
    first, end = _table(lines, start)
    cells = [
        [cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")] for line in lines[first + 2 : end]
    ]
    return [Row(*row) for row in cells]


def _table_lines(rows: list[Row]) -> list[str]:
    body = ["| " + " | ".join(_cell(cell) for cell in (row.fault, row.observed)) + " |" for row in rows]
    return [_HEAD, "|---|---|", *body]


def _write(lines: list[str]) -> None:
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
