"""Folders written by `samestep verify --out` and `samestep eval --report`: certificates, and scores by class."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from samestep.errors import InputError
from samestep.loggers.logger import format_metric
from samestep.metrics.class_report import ClassRow, class_rows, rows_of_table
from samestep.tools.run_lines import parse_finite
from samestep.tools.verify.verification import FORMAT, summary

CERTIFICATE_FILE = "certificate.json"
CLASSES_FILE = "classes.json"
_FINDING_KEYS = ("cause", "where", "evidence", "fix")
_MAX_OVERLAYS = 8
_MAX_BYTES, _MAX_SIDE = 250_000, 1200  # larger pictures are scaled down
_NOT_VALUES = ("checkpoint", "classes", "confusion", "step", "balanced_accuracy", "macro_f1")


def read_certificate(folder: Path) -> dict[str, Any]:
    """Return the content of the certificate in a folder, as `read_certificate_file`."""
    return read_certificate_file(folder / CERTIFICATE_FILE)


def read_certificate_file(path: Path) -> dict[str, Any]:
    """Return the content of a certificate for the page.

    `rows` has the verdict of each run for each quantity, `facts` the conditions, `findings` the causes, and `recipe`
    the verified recipe as plain data, None for a script.

    Raises:
        InputError: the certificate is missing, damaged or of another format.
    """
    with _reading(path, "samestep verify --out", "correct the path, or repeat samestep verify --out"):
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, not {FORMAT}")
        return _certificate(path, data)


@contextmanager
def _reading(path: Path, command: str, fix: str) -> Iterator[None]:
    """Report a missing or damaged file of a folder that a command has written."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        expected = f"a folder written by {command}, which contains {path.name}"
        raise InputError(f"{path} cannot be read: {cause}", expected, fix, code="E_UNREADABLE") from error


def _certificate(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    runs, environment = data["comparisons"], data["environment"]
    quantities = runs[0]["quantities"] if runs else ()
    return {
        "path": str(path),
        "holds": bool(data["holds"]),
        "summary": summary(data),
        "reference": str(data["reference"]),
        "recipe": None if data["recipe"] is None else dict(data["recipe"]),
        "runs": [str(run["processes"]) for run in runs],
        "rows": [(name, [_verdict(run, name) for run in runs]) for name in quantities],
        "facts": {
            "subject": " ".join([str(data["subject"]), *map(str, data["arguments"])]),
            "level": str(data["level"]),
            "steps": ", ".join(map(str, data["steps"])),
            "samples": f"{data['samples']}, {data['microbatches']} microbatches per batch",
            "arithmetic": f"{data['precision']}, reduction {data['reduction']}, batch norm {data['batch_norm']}",
            "device": str(environment["device"]),
            "torch": str(environment["torch"]),
            "time": str(data["time"]),
        },
        "findings": [{key: finding[key] for key in _FINDING_KEYS} for finding in data["findings"]],
        "notes": [str(note) for note in data["notes"]],
    }


def _verdict(run: dict[str, Any], name: str) -> str:
    verdict, distance = str(run["quantities"][name]), run["distances"][name]
    return f"{verdict} by {distance}" if verdict == "differs" and distance else verdict


@dataclass(frozen=True)
class Picture:
    """Picture as a data URI, with its size in pixels."""

    name: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class ClassReport:
    """One evaluation by class."""

    title: str  # evaluated checkpoint
    values: dict[str, str]
    rows: list[ClassRow]  # scores of all classes, or of the classes with the lowest F1 if there are many
    classes: int
    confusion: Picture | None
    overlays: list[Picture]  # the first of `overlay_count` pictures of masks
    overlay_count: int


def read_class_report(folder: Path) -> ClassReport:
    """Return the content of a folder written by `samestep eval --report`.

    Raises:
        InputError: the folder has other content.
    """
    path = folder / CLASSES_FILE
    with _reading(path, "samestep eval --report", "repeat the evaluation, or remove the folder from the command"):
        data = json.loads(path.read_bytes())
        rows = class_rows(data["confusion"], [str(row["name"]) for row in data["classes"]])
    numbers = {name: parse_finite(value) for name, value in data.items() if name not in _NOT_VALUES}
    overlays = sorted((folder / "overlays").glob("*.png"))
    pictures = [_picture(path) for path in overlays[:_MAX_OVERLAYS]]
    return ClassReport(
        title=f"{data.get('checkpoint', folder)}",
        values={name: format_metric(name, value) for name, value in numbers.items() if value is not None},
        rows=rows_of_table(rows),
        classes=len(rows),
        confusion=_picture(folder / "confusion.png"),
        overlays=[picture for picture in pictures if picture is not None],
        overlay_count=len(overlays),
    )


def _picture(path: Path) -> Picture | None:
    """Return a picture for the page; None if the file is missing or cannot be read."""
    try:
        data, kind = path.read_bytes(), "png"
        with Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.load()
            size = image.size
            if len(data) > _MAX_BYTES:
                smaller = image.convert("RGB")
                smaller.thumbnail((_MAX_SIDE, _MAX_SIDE))
                buffer = BytesIO()
                smaller.save(buffer, "JPEG", quality=85)
                data, kind, size = buffer.getvalue(), "jpeg", smaller.size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    return Picture(path.stem, f"data:image/{kind};base64,{base64.b64encode(data).decode()}", *size)
