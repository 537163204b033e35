"""Per-class precision, recall and F1 from a confusion matrix, as a table and as a plot."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from samestep.errors import RunError

_MAX_ROWS = 40  # of a table; the file has all classes
# Characters of a name in the table and in the plot.
_MAX_NAME = 30
_MAX_LABEL = 16
# Classes up to which the plot has numbers in cells, and names at ticks.
_MAX_CELL_NUMBERS = 20
_MAX_TICK_NAMES = 60

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ClassRow:
    """Scores of one class."""

    name: str
    precision: float | None  # share of its predictions that are correct; None without predictions
    recall: float | None  # share of its samples that are predicted as such; None without samples
    f1: float | None  # harmonic mean of both; None without samples and predictions
    count: int  # number of samples of the class
    predicted: int  # number of samples predicted as this class


def class_rows(counts: Counts, names: Sequence[str]) -> list[ClassRow]:
    """Return one row per class from `counts[class][prediction]`."""
    rows = []
    columns = zip(*counts, strict=True)
    for number, (name, row, column) in enumerate(zip(names, counts, columns, strict=True)):
        hits = row[number]
        count = sum(row)
        predicted = sum(column)
        scores = (_ratio(hits, predicted), _ratio(hits, count), _ratio(2 * hits, count + predicted))
        rows.append(ClassRow(name, *scores, count, predicted))
    return rows


def averages(rows: Sequence[ClassRow]) -> dict[str, float]:
    """Return the unweighted means of recall and F1 over the classes that have samples."""
    present = [row for row in rows if row.count]
    recall = sum(row.recall or 0.0 for row in present)
    f1 = sum(row.f1 or 0.0 for row in present)
    count = max(1, len(present))
    return {"balanced_accuracy": recall / count, "macro_f1": f1 / count}


def table_lines(rows: Sequence[ClassRow]) -> list[str]:
    """Return a table as aligned lines of text; of many classes, those with the lowest F1."""
    shown = rows
    remark = []
    if len(rows) > _MAX_ROWS:
        shown = sorted(rows, key=lambda row: (row.f1 is None, row.f1 or 0.0))[:_MAX_ROWS]
        remark = [f"these are the {len(shown)} of {len(rows)} classes with the lowest F1"]
    width = max(len("class"), *(len(_shortened(row.name, _MAX_NAME)) for row in shown))
    lines = [f"{'class':<{width}}  {'precision':>9}  {'recall':>7}  {'F1':>7}  {'samples':>7}"]
    for row in shown:
        scores = (row.precision, row.recall, row.f1)
        precision, recall, f1 = ("-" if score is None else f"{score:.2%}" for score in scores)
        name = _shortened(row.name, _MAX_NAME)
        lines.append(f"{name:<{width}}  {precision:>9}  {recall:>7}  {f1:>7}  {row.count:>7,}")
    return lines + remark


def _ratio(numerator: int, denominator: int) -> float | None:
    if denominator:
        return numerator / denominator
    return None


def _shortened(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    return name[: length - 1] + "…"


def write_report(folder: Path, by_class: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Write the result of an evaluation per class; return its lines for the terminal."""
    names = by_class["classes"]
    counts = by_class["counts"]
    rows = class_rows(counts, names)
    classes = [asdict(row) for row in rows]
    data = {**result, **averages(rows), "classes": classes, "confusion": counts}
    table = folder / "classes.json"
    picture = folder / "confusion.png"
    try:
        table.write_text(json.dumps(data) + "\n", encoding="utf-8")
        (folder / "samples.json").write_text(json.dumps(by_class["samples"]), encoding="utf-8")
        draw_confusion(counts, names, picture)
    except OSError as error:
        value = f"{folder} cannot be written: {error.strerror}"
        fix = "free disk space, or --report with another folder"
        raise RunError(value, fix=fix, code="E_OUTPUT") from error
    files = [str(table), str(picture)]
    if any("text" not in sample for sample in by_class["samples"]):
        files.append(str(folder / "overlays"))
    return ["", *table_lines(rows), "", f"{'report':<12}{', '.join(files)}"]


def draw_confusion(counts: Counts, names: Sequence[str], path: Path) -> None:
    """Write a PNG of the confusion matrix.

    Rows are classes, columns predictions; darkness is the share of the row.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Not by `pyplot`, which would keep the figure for the life of the process.
    matrix = numpy.asarray(counts, dtype=numpy.int64)
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(1)
    side = min(24.0, 3.0 + 0.42 * len(names))
    with warnings.catch_warnings(), matplotlib.rc_context({"text.parse_math": False}):
        # A name may be in a script that the font does not have.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_xlabel("prediction")
        axes.set_ylabel("class")
        ticks = range(len(names)) if len(names) <= _MAX_TICK_NAMES else []
        labels = [_shortened(names[number], _MAX_LABEL) for number in ticks]
        axes.set_xticks(ticks, labels, rotation=90)
        axes.set_yticks(ticks, labels)
        if len(names) <= _MAX_CELL_NUMBERS:
            for row, column in zip(*matrix.nonzero(), strict=True):
                color = "white" if shares[row, column] > 0.5 else "black"
                style: Any = {"ha": "center", "va": "center", "color": color, "fontsize": 8}
                axes.text(column, row, f"{matrix[row, column]:,}", **style)
        figure.savefig(path, dpi=100)
