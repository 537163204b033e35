"""The page of faults, which the tests of faults write."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/faults.md"
_HEAD = "| fault | expected | observed |"


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    expected: str
    observed: str


def write_page(rows: list[Row]) -> None:
    """Put the table into the page in place of the one that is there; what stands above it stays."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [_HEAD, "|---|---|---|"]
    lines += ["| " + " | ".join(_cell(cell) for cell in (row.fault, row.expected, row.observed)) + " |" for row in rows]
    PAGE.write_text(text[: text.index(_HEAD)] + "\n".join(lines) + "\n", encoding="utf-8")


def read_rows(text: str) -> list[Row]:
    """The rows of the table."""
    lines = text[text.index(_HEAD) :].splitlines()[2:]
    cells = [[cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")] for line in lines]
    return [Row(*each) for each in cells]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
