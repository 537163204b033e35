"""The lines of a list that people write: CSV, TSV, JSON or JSONL."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import DataError


@dataclass(frozen=True)
class Row:
    """One line of a list.

    Attributes:
        where: the list and the line in it.
        values: by column.
        fault: what is wrong with the line as a whole.
    """

    where: str
    values: Mapping[str, Any]
    fault: str | None = None


def read_rows(path: Path) -> list[Row]:
    """The lines of a list: a `.csv` or `.tsv` with a header, a `.json` list of mappings, a `.jsonl` with one a line.

    A line that has another form than the others is a row with a fault.

    Raises:
        DataError: the file is not there, or is no such list.
    """
    readers = {".csv": _csv_rows, ".tsv": _csv_rows, ".json": _json_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{path} is no list of images", rule=f"a file that ends in {', '.join(readers)}", do="look at the path"
        )
    if not path.is_file():
        raise DataError(f"there is no file {path}", rule="data.options.path is a list of images", do="look at the path")
    try:
        rows = readers[path.suffix](path)
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            rule="UTF-8; CSV or TSV with a header, a JSON list of mappings, or JSONL",
            do="mend the place that is named",
        ) from error
    if not rows:
        raise DataError(f"{path} has no lines", rule="at least one image", do="look at the file")
    return rows


def _csv_rows(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        for values in reader:
            extra = values.pop(None, None)
            columns = len(reader.fieldnames or ())
            fault = f"{columns + len(extra)} values in {columns} columns" if extra else None
            rows.append(Row(f"{path}, line {reader.line_num}", values, fault))
    return rows


def _json_rows(path: Path) -> list[Row]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(found, list):
        raise DataError(f"{path} holds a {type(found).__name__}", rule="a list of mappings", do="[{...}, {...}]")
    return [_json_row(f"{path}, entry {number}", value) for number, value in enumerate(found, start=1)]


def _jsonl_rows(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(f"line {number} is no JSON: {error.msg}", line, error.pos) from error
            rows.append(_json_row(f"{path}, line {number}", value))
    return rows


def _json_row(where: str, value: object) -> Row:
    return Row(where, value) if isinstance(value, Mapping) else Row(where, {}, f"a {type(value).__name__}, no mapping")
