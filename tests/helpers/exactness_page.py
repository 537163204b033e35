"""Table of layouts in docs/concepts/exactness.md, written by `tests/parity/test_layouts.py`."""

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/concepts/exactness.md"
_HEADING = "## Layouts"


def write_table(recipes: Sequence[str], layouts: Sequence[str], held: Sequence[tuple[str, str, str, int]]) -> None:
    """Replace the table below the heading `Layouts`; the text around it is unchanged.

    Args:
        recipes: the columns.
        layouts: the rows.
        held: recipe, precision, layout and number of ranks with the bits of one process.
    """
    rows = [["layout", "precision", *recipes], ["---"] * (2 + len(recipes))]
    for layout in layouts:
        for precision in ("fp32", "bf16"):
            cells = [
                ", ".join(str(ranks) for *case, ranks in held if case == [recipe, precision, layout])
                for recipe in recipes
            ]
            if any(cells):
                rows.append([f"`{layout}`", precision, *cells])
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(number for number in range(lines.index(_HEADING), len(lines)) if lines[number].startswith("|"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    lines[first:end] = ["| " + " | ".join(row) + " |" for row in rows]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
