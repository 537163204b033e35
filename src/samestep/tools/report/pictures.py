"""What `samestep eval --report` wrote: classes, the confusion matrix, and masks over what a model saw."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from samestep.errors import InputError
from samestep.record.class_table import ClassRow, class_rows
from samestep.record.values import shown
from samestep.tools.report.json_lines import finite

_OVERLAYS = 8
_ROWS = 40
_BYTES, _SIDE = 250_000, 1200  # a larger picture is made smaller
_NOT_VALUES = ("checkpoint", "classes", "confusion", "step", "balanced_accuracy", "macro_f1")


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI, with its size in pixels."""

    name: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class ClassReport:
    """One evaluation class by class.

    Attributes:
        title: which weights.
        values: the numbers of the evaluation, as they are shown.
        rows: of very many classes, those with the lowest F1.
        overlays: the first pictures of masks, of `overlays_in_all`.
    """

    title: str
    values: dict[str, str]
    rows: list[ClassRow]
    classes: int
    confusion: Picture | None
    overlays: list[Picture]
    overlays_in_all: int


def find_reports(run: Path) -> list[Path]:
    """Folders with a report in a run's folder: itself, or one in it."""
    return [path.parent for path in sorted([*run.glob("classes.json"), *run.glob("*/classes.json")])]


def read_report(folder: Path) -> ClassReport:
    """What is in a folder that `samestep eval --report` wrote.

    Raises:
        InputError: it holds something else.
    """
    path = folder / "classes.json"
    try:
        data = json.loads(path.read_bytes())
        counts, names = data["confusion"], [str(row["name"]) for row in data["classes"]]
        rows = class_rows(counts, names)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise InputError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            rule="a folder that `samestep eval --report` wrote, with classes.json in it",
            do="write it again, or leave it out",
        ) from error
    worst = sorted(rows, key=lambda row: (row.f1 is None, row.f1 or 0.0))
    overlays = sorted((folder / "overlays").glob("*.png"))
    pictures = [_picture(path) for path in overlays[:_OVERLAYS]]
    return ClassReport(
        title=f"{data.get('checkpoint', folder)}",
        values=_values(data),
        rows=rows if len(rows) <= _ROWS else worst[:_ROWS],
        classes=len(rows),
        confusion=_picture(folder / "confusion.png"),
        overlays=[picture for picture in pictures if picture is not None],
        overlays_in_all=len(overlays),
    )


def _values(data: dict[str, Any]) -> dict[str, str]:
    numbers = {name: finite(value) for name, value in data.items() if name not in _NOT_VALUES}
    return {name: shown(name, value) for name, value in numbers.items() if value is not None}


def _picture(path: Path) -> Picture | None:
    """A picture to be embedded; None where there is none that can be read."""
    try:
        data = path.read_bytes()
        with Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.load()
            kind = "png"
            if len(data) > _BYTES:
                smaller = image.convert("RGB")
                smaller.thumbnail((_SIDE, _SIDE))
                buffer = BytesIO()
                smaller.save(buffer, "JPEG", quality=85)
                data, kind, size = buffer.getvalue(), "jpeg", smaller.size
            else:
                size = image.size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return Picture(path.stem, uri, *size)
