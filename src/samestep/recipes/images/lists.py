"""Images that a list names: a CSV, TSV, JSON or JSONL file with a path and a label for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from samestep.config.check import require
from samestep.errors import DataError
from samestep.recipes.images.augment import augment_of
from samestep.recipes.images.decode import read_image
from samestep.recipes.images.list_rows import Row, read_rows
from samestep.recipes.images.view import MEAN, STD, Transform, View
from samestep.recipes.kept_apart import kept_apart
from samestep.recipes.splits import Splits

Labels = Literal["names", "numbers"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a list; what cannot be used is said when it is asked for.

    Attributes:
        where: the list and the line in it.
        file: the image, if the line names one.
        label: the class number, if the line has a class.
        fault: what is wrong with the line.
    """

    where: str
    file: Path | None
    label: int | None
    fault: str | None


class ListedImages:
    """Image files that a list names, read and transformed when asked for."""

    def __init__(self, entries: list[Entry], transform: Transform) -> None:
        self._entries, self._transform = entries, transform

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        entry = self._entries[index]
        if entry.file is None or entry.label is None:
            raise DataError(
                f"{entry.where}: {entry.fault}",
                rule="every line has the path of an image and a label that is one of the classes",
                do="correct the line; or leave such lines out: data.bad_samples: skip",
            )
        return self._transform(read_image(entry.file)), entry.label


def load_image_list(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    image_root: str | None = None,
    path_column: str = "path",
    label_column: str = "label",
    labels: Labels = "names",
    classes: Sequence[str] | None = None,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Images that a list names, with a class each.

    Args:
        path: a `.csv` or `.tsv` with a header, a `.json` list of mappings, or a `.jsonl` with a mapping a line.
        evaluation_path: another such list to evaluate on; else a part of `path` is kept apart.
        evaluation_fraction: how much of each class is kept apart, by a hash of the path as it stands in the list.
        image_root: the folder that paths are relative to; the folder of the list itself where it is not given.
        path_column: where the path stands.
        label_column: where the label stands.
        labels: `names`: a label is the name of a class; `numbers`: it is a class number, from 0.
        classes: the names; else, of names, those that `path` has, sorted, and of numbers, 0 to the largest in it.
        image_size: pixels of the square that the model sees; this and the next four as in `View`.
        augment: options of `Augment`; None for a random crop and flip.

    Raises:
        InputError: a list is not there or cannot be read, or an option cannot be.
    """
    view = View(image_size=image_size, crop_fraction=crop_fraction, interpolation=interpolation, mean=mean, std=std)
    wanted = augment_of(augment)
    columns, own = (path_column, label_column), read_rows(Path(path))
    names = _classes(path, own, columns, labels, classes)
    entries = partial(_entries, root=image_root, columns=columns, number_of=_numbers(labels, names))
    train = entries(own, path)
    if evaluation_path is not None:
        evaluation = entries(read_rows(Path(evaluation_path)), evaluation_path)
    else:
        keys = [str(row.values.get(path_column)) for row in own]
        parts = kept_apart(keys, [entry.label for entry in train], names, evaluation_fraction)
        train, evaluation = ([train[place] for place in places] for places in parts)
    return Splits(
        train=ListedImages(train, view.training(wanted)),
        evaluation=ListedImages(evaluation, view.evaluating()),
        classes=names,
        reads_files=True,
        train_collate=wanted.mixing(len(names)),
    )


def _classes(
    path: str, rows: list[Row], columns: tuple[str, str], labels: Labels, given: Sequence[str] | None
) -> tuple[str, ...]:
    require(
        labels in ("names", "numbers"),
        f"data.options.labels is {labels!r}",
        "names or numbers",
        "set data.options.labels: names",
    )
    if given is not None:
        found = [str(name) for name in given] if isinstance(given, list | tuple) else []
        rule = "a list of at least two different names"
        require(
            len(found) >= 2 and len(set(found)) == len(found),
            f"data.options.classes is {given!r}",
            rule,
            "set data.options.classes: [cat, dog]",
        )
        return tuple(found)
    _require_columns(rows, path, columns)
    texts = {text for row in rows if row.fault is None and (text := _text(row.values.get(columns[1]))) is not None}
    if labels == "numbers":
        largest = max((int(text) for text in texts if _is_number(text)), default=-1)
        found = [str(number) for number in range(largest + 1)]
    else:
        found = sorted(texts)
    if len(found) < 2:
        raise DataError(
            f"{path} has {len(found)} classes in its column {columns[1]!r}",
            rule="at least two",
            do="look at data.options.label_column, or give data.options.classes",
        )
    return tuple(found)


def _entries(
    rows: list[Row], file: str, *, root: str | None, columns: tuple[str, str], number_of: Callable[[str], int | None]
) -> list[Entry]:
    _require_columns(rows, file, columns)
    folder = Path(root) if root is not None else Path(file).parent
    return [_entry(row, folder, columns, number_of) for row in rows]


def _numbers(labels: Labels, classes: Sequence[str]) -> Callable[[str], int | None]:
    """From a label as text to the number of its class, None for what is no class."""
    numbers = {name: number for number, name in enumerate(classes)}
    if labels == "names":
        return numbers.get
    return lambda text: int(text) if _is_number(text) and int(text) < len(classes) else None


def _entry(row: Row, root: Path, columns: tuple[str, str], number_of: Callable[[str], int | None]) -> Entry:
    path, text = row.values.get(columns[0]), _text(row.values.get(columns[1]))
    if row.fault is not None:
        return Entry(row.where, None, None, row.fault)
    if not isinstance(path, str) or not path or "\0" in path:
        return Entry(row.where, None, None, f"no path in {columns[0]!r}")
    label = None if text is None else number_of(text)
    fault = None
    if text is None:
        fault = f"no label in {columns[1]!r}"
    elif label is None:
        fault = f"the label {text!r} is no class"
    return Entry(row.where, root / path, label, fault)


def _text(value: object) -> str | None:
    """A label as text; JSON may have it as a whole number."""
    is_label = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return str(value) if is_label else None


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", text) is not None


def _require_columns(rows: list[Row], path: str, columns: tuple[str, str]) -> None:
    seen = {name: None for row in rows for name in row.values}
    for option, name in zip(("path_column", "label_column"), columns, strict=True):
        if rows and name not in seen:
            raise DataError(
                f"{path} has no column {name!r}",
                rule=f"columns here: {', '.join(map(str, seen))}",
                do=f"set data.options.{option}",
            )
