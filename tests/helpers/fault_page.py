"""Table of faults in docs/guides/faults.md, written by the fault tests."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/guides/faults.md"
_HEAD = "| fault | expected | observed |"


@dataclass(frozen=True)
class Row:
    """Row of the table: one fault."""

    fault: str
    expected: str
    observed: str


def write_page(rows: list[Row]) -> None:
    """Replace the table of the page; the text above the table is unchanged."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [_HEAD, "|---|---|---|"]
    lines += ["| " + " | ".join(_cell(cell) for cell in (row.fault, row.expected, row.observed)) + " |" for row in rows]
    PAGE.write_text(text[: text.index(_HEAD)] + "\n".join(lines) + "\n", encoding="utf-8")


def read_rows(text: str) -> list[Row]:
    """Return the rows of the table in the text of a page."""
    lines = text[text.index(_HEAD) :].splitlines()[2:]
    cells = [[cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")] for line in lines]
    return [Row(*row) for row in cells]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
