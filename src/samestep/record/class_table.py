"""What a matrix of class counts says about each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Classes in a table on a terminal; the file has all of them.
_SHOWN = 40
_LONGEST = 30

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ClassRow:
    """One class.

    Attributes:
        precision: of what was taken for it, how much is of it; None if nothing was.
        recall: of what is of it, how much was taken for it; None if nothing is.
        f1: their harmonic mean; None if there is nothing of either.
        count: samples of the class.
        predicted: samples that were taken for it.
    """

    name: str
    precision: float | None
    recall: float | None
    f1: float | None
    count: int
    predicted: int


def class_rows(counts: Counts, names: Sequence[str]) -> list[ClassRow]:
    """A row a class, from `counts[class][taken for]`."""
    rows = []
    for number, name in enumerate(names):
        hits, count = counts[number][number], sum(counts[number])
        predicted = sum(row[number] for row in counts)
        f1 = _ratio(2 * hits, count + predicted)
        rows.append(ClassRow(name, _ratio(hits, predicted), _ratio(hits, count), f1, count, predicted))
    return rows


def averages(rows: Sequence[ClassRow]) -> dict[str, float]:
    """The mean recall and F1 over the classes that have samples, each class counting the same."""
    there = [row for row in rows if row.count]
    if not there:
        return {"balanced_accuracy": 0.0, "macro_f1": 0.0}
    recalls, scores = [row.recall or 0.0 for row in there], [row.f1 or 0.0 for row in there]
    return {"balanced_accuracy": sum(recalls) / len(there), "macro_f1": sum(scores) / len(there)}


def table_lines(rows: Sequence[ClassRow]) -> list[str]:
    """The rows as lines of text; of very many classes, those with the lowest F1."""
    shown, more = list(rows), []
    if len(rows) > _SHOWN:
        worst = sorted(range(len(rows)), key=lambda number: (rows[number].f1 is None, rows[number].f1, number))
        shown = [rows[number] for number in worst[:_SHOWN]]
        more = [f"these are the {_SHOWN} of {len(rows)} classes with the lowest F1"]
    width = max(len("class"), *(len(_short(row.name)) for row in shown))
    head = f"{'class':<{width}}  {'precision':>9}  {'recall':>7}  {'F1':>7}  {'samples':>7}"
    lines = [
        f"{_short(row.name):<{width}}  {_percent(row.precision):>9}  {_percent(row.recall):>7}  "
        f"{_percent(row.f1):>7}  {row.count:>7,}"
        for row in shown
    ]
    return [head, *lines, *more]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
