"""Per-class precision, recall and F1 from a confusion matrix, as a table and as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.errors import RunError

_MAX_ROWS = 40  # of a table; the file has all classes
_MAX_NAME = 30  # characters of a name in the table

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
    width = max(len("class"), *(len(_shortened(row.name)) for row in shown))
    lines = [f"{'class':<{width}}  {'precision':>9}  {'recall':>7}  {'F1':>7}  {'samples':>7}"]
    for row in shown:
        scores = (row.precision, row.recall, row.f1)
        precision, recall, f1 = ("-" if score is None else f"{score:.2%}" for score in scores)
        name = _shortened(row.name)
        lines.append(f"{name:<{width}}  {precision:>9}  {recall:>7}  {f1:>7}  {row.count:>7,}")
    return lines + remark


def _ratio(numerator: int, denominator: int) -> float | None:
    if denominator:
        return numerator / denominator
    return None


def _shortened(name: str) -> str:
    if len(name) <= _MAX_NAME:
        return name
    return name[: _MAX_NAME - 1] + "…"


def write_report(folder: Path, by_class: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Write the result of an evaluation per class; return its lines for the terminal."""
    names = by_class["classes"]
    counts = by_class["counts"]
    rows = class_rows(counts, names)
    classes = [asdict(row) for row in rows]
    data = {**result, **averages(rows), "classes": classes, "confusion": counts}
    table = folder / "classes.json"
    try:
        table.write_text(json.dumps(data) + "\n", encoding="utf-8")
        (folder / "samples.json").write_text(json.dumps(by_class["samples"]), encoding="utf-8")
    except OSError as error:
        value = f"{folder} cannot be written: {error.strerror}"
        fix = "free disk space, or --report with another folder"
        raise RunError(value, fix=fix, code="E_OUTPUT") from error
    files = [str(table)]
    if any("text" not in sample for sample in by_class["samples"]):
        files.append(str(folder / "overlays"))
    return ["", *table_lines(rows), "", f"{'report':<12}{', '.join(files)}"]
