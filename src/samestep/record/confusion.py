"""A picture of how often each class was taken for each other one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy

from samestep.errors import InputError
from samestep.record.class_table import Counts

_WITH_NUMBERS, _WITH_NAMES = 20, 60  # classes up to which a cell has its number, and an axis its names
_LONGEST = 16


def require_pictures(what: str) -> None:
    """See, before anything is computed for it, that a picture can be drawn.

    Args:
        what: it shows.

    Raises:
        InputError: it cannot.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            f"a picture of the {what} needs matplotlib",
            rule="it is not installed with Samestep",
            do="pip install 'samestep[zoo]'",
        )


def draw_confusion(counts: Counts, names: Sequence[str], path: Path) -> None:
    """Write a PNG: a row a class, a column for what it was taken for, darker where that is more of the row."""
    import matplotlib
    from matplotlib.figure import Figure

    matrix = numpy.asarray(counts, dtype=numpy.int64)
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(1)
    side = min(24.0, 3.0 + 0.42 * len(names))
    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in a script that the font does not have
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_xlabel("taken for")
        axes.set_ylabel("class")
        ticks = range(len(names)) if len(names) <= _WITH_NAMES else []
        short = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names]
        axes.set_xticks(ticks, [short[number] for number in ticks], rotation=90)
        axes.set_yticks(ticks, [short[number] for number in ticks])
        if len(names) <= _WITH_NUMBERS:
            for row, column in zip(*matrix.nonzero(), strict=True):
                colour = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
        figure.savefig(path, dpi=100)
