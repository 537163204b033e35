"""Labels: class names, class numbers of labels, and rows of tables with a label."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.config.validation import require_path
from samestep.errors import DataError
from samestep.zoo.options import import_optional, unusable

_MAX_LISTED = 20  # labels in an error
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
# Of a class number: Python refuses to read thousands of digits.
_MAX_DIGITS = 9
# The csv module refuses cells above 128 KiB by default.
_MAX_CELL = 2**31 - 1


def label_text(value: object) -> str:
    """Return a label as text, empty if missing; 1 and 1.0 are equal labels."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan:
        return ""
    return str(value).strip()


def class_names(classes: object) -> tuple[str, ...]:
    """Return class names of `data.options.classes`, or of the data.

    Raises:
        DataError: they are not at least two different names; YAML reads `yes` and `no` as booleans.
    """
    values = list(classes) if isinstance(classes, list | tuple | range) else []
    names = tuple(map(str, values))
    are_different = len({label_text(name) for name in names}) == len(names)
    if len(names) < 2 or not are_different or any(isinstance(value, bool) for value in values):
        raise DataError(
            f"the classes are {classes!r}",
            expected="at least two different names; in YAML, yes and no are booleans without "
            "quotation marks",
            fix="correct the labels, or set data.options.classes, such as ['no', 'yes']",
            code="E_CLASSES",
        )
    return names


class ClassLabels:
    """Class numbers of labels, which are class names.

    A label can also be a class number, unless some names are other numbers: with names 1 to 3, a
    label 2 is ambiguous.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._numbers = {label_text(name): number for number, name in enumerate(classes)}
        are_numbers = all(name == str(number) for name, number in self._numbers.items())
        self._reads_numbers = are_numbers or not any(
            _NUMBER.fullmatch(name) for name in self._numbers
        )

    def number(self, label: str, place: str) -> int:
        """Return the class number of a label at `place`.

        Raises:
            DataError: the label is not a class.
        """
        number = self._numbers.get(label, -1)
        is_number = self._reads_numbers and label.isdecimal() and len(label) <= _MAX_DIGITS
        if label not in self._numbers and is_number:
            number = int(label)
        if not 0 <= number < len(self._numbers):
            listed = ", ".join(list(self._numbers)[:_MAX_LISTED])
            expected = f"a class, such as {listed}, or its number from 0"
            fix = "correct the label or data.options.classes"
            raise unusable(
                f"{place}: the label {label!r} is not a class", expected, fix, "E_CLASSES"
            )
        return number


# With slots: a table can have millions of rows.
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
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing.values())}",
            expected=f"columns among {', '.join(map(str, names))}",
            fix=f"set {', '.join(f'data.options.{key}' for key in missing)}",
            code="E_UNKNOWN_NAME",
        )
    return [_row(where, values, text_column, label_column) for where, values in rows]


def _row(where: str, values: Mapping[Any, Any], text_column: str, label_column: str) -> Row:
    text = values.get(text_column)
    name = label_text(values.get(label_column))
    if None in values:  # as the csv module names cells without a column
        return Row(where, "", "", f"{len(values[None])} values without a column")
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        return Row(where, "", name, f"no text or path, but {text!r}")
    if not name:
        return Row(where, text, name, "no label")
    return Row(where, text, name)


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    csv.field_size_limit(_MAX_CELL)
    # Spreadsheets write a mark of the encoding, which would be part of the first column name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for values in reader:
            yield f"{path}, line {reader.line_num}", values


def _txt_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            # From the right: a path can contain spaces.
            cells = line.strip().rsplit(maxsplit=1)
            if cells:
                yield f"{path}, line {number}", dict(zip(("path", "label"), cells, strict=False))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    table = import_optional("pyarrow.parquet", str(path)).read_table(path)
    for number, values in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", values
