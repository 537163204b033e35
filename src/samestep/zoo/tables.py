"""Rows of tables with a label: CSV, Parquet and lists of a path and a class number."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import DataError
from samestep.zoo.options import import_optional, require_path
from samestep.zoo.splits import label_text

# The csv module refuses cells above 128 KiB by default.
_MAX_CELL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table. A row that cannot be used has an empty text or label, and a problem."""

    where: str  # file and line, for errors
    text: str  # a text, or the path of an image
    label: str  # empty if missing
    problem: str = ""


def read_table(path: str, text_column: str, label_column: str, option: str) -> list[Row]:
    """Return the rows of a `.csv` with a header, a `.parquet`, or a `.txt`.

    Lines of a `.txt` are those of PaddleViT's lists: a path and a class number, separated by white
    space.

    Args:
        path: path of the table.
        text_column: name of the column of texts or paths.
        label_column: name of the column of labels.
        option: option of `data.options` that names the first column, for errors.

    Raises:
        DataError: the file is missing, empty, damaged or of another format, or lacks a column.
    """
    readers = {".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _txt_rows}
    file = Path(path)
    require_path(file, "file", "data.options.path is a table")
    reader = readers.get(file.suffix.lower())
    try:
        if reader is None:
            raise ValueError("the suffix is another one")
        rows = list(reader(file))
        if not rows:
            raise ValueError("there are no rows")
    except (OSError, ValueError, csv.Error) as error:  # exceptions of Arrow are among them
        raise DataError(
            f"{path} cannot be read as a table: {error}",
            expected=f"an intact table in UTF-8 that ends in {', '.join(readers)}",
            fix="correct the file, or write it again as .csv",
            code="E_UNREADABLE",
        ) from error
    names = dict.fromkeys(name for _, values in rows for name in values)
    columns = {option: text_column, "label_column": label_column}
    missing = {key: name for key, name in columns.items() if name not in names}
    if missing and file.suffix.lower() != ".txt":
        raise DataError(
            f"{path} has no column {', '.join(missing.values())}",
            expected=f"columns among {', '.join(map(str, names))}",
            fix=f"set {', '.join(f'data.options.{key}' for key in missing)}",
            code="E_UNKNOWN_NAME",
        )
    return [
        _row(where, values.get(text_column), values.get(label_column), values)
        for where, values in rows
    ]


def _row(where: str, text: object, label: object, values: Mapping[Any, Any]) -> Row:
    name = label_text(label)
    if None in values:  # as the csv module names cells without a column
        return Row(where, "", "", f"{len(values[None])} values without a column")
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        return Row(where, "", name, f"no text or path, but {text!r}")
    return Row(where, text, name, "" if name else "no label")


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    csv.field_size_limit(_MAX_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for values in reader:
            yield f"{path}, line {reader.line_num}", values


def _txt_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            cells = line.strip().rsplit(maxsplit=1)
            if cells:
                yield f"{path}, line {number}", dict(zip(("path", "label"), cells, strict=False))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    table = import_optional("pyarrow.parquet", str(path)).read_table(path)
    for number, values in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", values
