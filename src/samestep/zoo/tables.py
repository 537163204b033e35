"""Rows of CSV, TSV, JSONL, Parquet and text files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import DataError
from samestep.zoo.options import import_optional, require_path

# The csv module refuses cells above 128 KiB by default.
_MAX_CELL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    where: str  # file and line, for errors
    values: Mapping[str, Any]  # cells by column
    problem: str = ""  # reason why the row cannot be used; empty for valid rows


def read_table(path: Path) -> list[Row]:
    """Return the rows of a `.csv` or `.tsv` with a header, a `.jsonl`, a `.parquet` or a `.txt`.

    Lines of a `.txt` are those of PaddleViT's lists: a path and a class number, separated by white space.

    Invalid rows of a valid file are included, with a problem.

    Raises:
        DataError: the file is missing, empty, damaged or of another format.
    """
    readers: dict[str, Callable[[Path], Iterable[Row]]] = {
        ".csv": _csv_rows,
        ".tsv": _csv_rows,
        ".jsonl": _jsonl_rows,
        ".parquet": _parquet_rows,
        ".txt": _txt_rows,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path} ends in {path.suffix or 'no suffix'}",
            expected=f"a table that ends in {', '.join(readers)}",
            fix="convert the file, or correct the path",
            code="E_UNREADABLE",
        )
    require_path(path, "file", "data.options.path is a table")
    try:
        rows = list(reader(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _damaged(path, error) from error
    if not rows:
        raise DataError(f"{path} has no rows", expected="at least one row", fix="add rows", code="E_UNREADABLE")
    return rows


def require_columns(rows: Iterable[Row], path: str | Path, columns: Mapping[str, str]) -> None:
    """Require columns, given as a mapping from the option of `data.options` to the column name.

    Raises:
        DataError: no row has a column of this name.
    """
    names = dict.fromkeys(str(name) for row in rows for name in row.values)
    for option, column in columns.items():
        if names and column not in names:
            raise DataError(
                f"{path} has no column {column!r}",
                expected=f"one of the columns {', '.join(names)}",
                fix=f"--set data.options.{option}=NAME; cells of .csv are separated by commas, those of .tsv by tabs",
                code="E_UNKNOWN_NAME",
            )


def _csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CELL)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        for values in reader:
            extra = values.pop(None, None)
            columns = len(reader.fieldnames or ())
            problem = f"{columns + len(extra)} values in {columns} columns" if extra else ""
            yield Row(f"{path}, line {reader.line_num}", values, problem)


def _txt_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            cells = line.strip().rsplit(maxsplit=1)
            if cells:
                problem = "" if len(cells) == 2 else "no path and class number, separated by white space"
                yield Row(f"{path}, line {number}", dict(zip(("path", "label"), cells, strict=False)), problem)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _json_row(f"{path}, line {number}", line)


def _json_row(where: str, line: str) -> Row:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return Row(where, {}, f"not JSON: {error}")
    except UnicodeEncodeError:
        return Row(where, {}, "text with half of a surrogate pair")
    if not isinstance(value, Mapping):
        return Row(where, {}, f"a {type(value).__name__} instead of a mapping")
    return Row(where, value)


def _parquet_rows(path: Path) -> Iterator[Row]:
    parquet = import_optional("pyarrow.parquet", str(path))
    arrow = import_optional("pyarrow", str(path))
    try:
        rows = parquet.read_table(path).to_pylist()
    except arrow.ArrowException as error:
        raise _damaged(path, error) from error
    for number, values in enumerate(rows, start=1):
        yield Row(f"{path}, row {number}", values)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read: {error}",
        expected="an intact table; text in UTF-8; quotation marks in pairs around a cell of .csv and .tsv",
        fix="correct the file, or write it again as .csv or .jsonl",
        code="E_UNREADABLE",
    )
