"""Rows of text and label from CSV, JSONL and Parquet files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import DataError

# The csv module refuses cells of more than 128 KiB, and texts may be longer.
_LONGEST_CELL = 2**31 - 1


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        where: file and row number, from 1, as people find it again; of JSONL, the line.
        problem: why the row cannot be used; empty for nothing.
        label: as text, whatever it was in the file; empty for none.
    """

    where: str
    text: str
    label: str
    problem: str = ""


def read_rows(path: Path, text_column: str, label_column: str) -> list[Row]:
    """The rows of a file, those that cannot be used among them.

    Raises:
        DataError: the file is not there, is damaged as a whole, or has no such column.
    """
    readers: dict[str, Callable[[Path, str, str], Iterator[Row]]] = {
        ".csv": _csv,
        ".tsv": _csv,
        ".jsonl": _jsonl,
        ".ndjson": _jsonl,
        ".parquet": _parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} ends in {path.suffix or 'nothing'}", rule=f"one of {', '.join(readers)}", do="convert the file"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}", rule="rows of text and label", do="look at data.options.path")
    try:
        rows = list(reader(path, text_column, label_column))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _damaged(path, str(error)) from error
    if not rows:
        raise DataError(f"{path} has no rows", rule="at least one", do="look at the file")
    return rows


def _csv(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        _require_columns(path, list(reader.fieldnames or ()), text_column, label_column)
        for number, cells in enumerate(reader, start=1):
            yield _row(path, number, cells[text_column], cells[label_column])


def _jsonl(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                cells = json.loads(line)
            except json.JSONDecodeError as error:
                yield Row(f"{path} row {number}", "", "", f"it is not JSON: {error}")
                continue
            if not isinstance(cells, dict):
                yield Row(f"{path} row {number}", "", "", "it is no JSON object")
                continue
            if number == 1:
                _require_columns(path, list(cells), text_column, label_column)
            yield _row(path, number, cells.get(text_column), cells.get(label_column))


def _parquet(path: Path, text_column: str, label_column: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path} cannot be read: {error}", rule="Parquet is read by pyarrow", do="pip install 'samestep[zoo]'"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_columns(path, list(file.schema_arrow.names), text_column, label_column)
        table = file.read(columns=[text_column, label_column])
    except pyarrow.ArrowException as error:
        raise _damaged(path, str(error)) from error
    cells = zip(table[text_column].to_pylist(), table[label_column].to_pylist(), strict=True)
    for number, (text, label) in enumerate(cells, start=1):
        yield _row(path, number, text, label)


def _row(path: Path, number: int, text: Any, label: Any) -> Row:
    where = f"{path} row {number}"
    if not isinstance(text, str) or not text.strip():
        what = "empty" if text is None or isinstance(text, str) else f"a {type(text).__name__}"
        return Row(where, "", _as_text(label), f"its text is {what}")
    return Row(where, text, _as_text(label), "")


def _as_text(label: Any) -> str:
    """A label as people write it: 1 and 1.0 of different files are the same one."""
    if label is None:
        return ""
    whole = isinstance(label, float) and label.is_integer()
    return str(int(label) if whole else label).strip()


def _require_columns(path: Path, found: list[str], *wanted: str) -> None:
    for name in wanted:
        if name not in found:
            raise DataError(
                f"{path} has no column {name!r}",
                rule=f"its columns are {', '.join(map(str, found)) or 'none'}",
                do="--set data.options.text_column=NAME data.options.label_column=NAME",
            )


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} cannot be read: {why}", rule="a whole file, text in UTF-8", do="write it again")
