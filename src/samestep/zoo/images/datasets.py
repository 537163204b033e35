"""Images in one folder per class, and images of a list: a table with a path and a label per row."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from samestep.config.validation import require
from samestep.data.folder_files import by_suffix, files_below, left_out_notes
from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError
from samestep.zoo.images.decoders import Decoder, ReadImage
from samestep.zoo.images.files import IMAGE_SUFFIXES
from samestep.zoo.images.source import open_cache
from samestep.zoo.images.transforms import MEAN, STD, Augment, ImageTransforms, Transform, parse_augment
from samestep.zoo.options import require_path
from samestep.zoo.splits import (
    Splits,
    Task,
    label_text,
    require_no_booleans,
    text_problem,
    top_classes,
    train_validation_split,
)
from samestep.zoo.tables import Row, read_table, require_columns

Labels = Literal["names", "numbers"]
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


class Sample(NamedTuple):
    """One image. An unusable row of a list raises its error on access."""

    file: Path
    label: int | None  # class number; None for an unusable row
    problem: str = ""  # list, line, and reason why the row cannot be used; empty for other rows


class ImageFiles:
    """Image files with class numbers, decoded and transformed on access."""

    def __init__(self, samples: list[Sample], read: ReadImage, transform: Transform) -> None:
        self._samples, self._read, self._transform = samples, read, transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label, problem = self._samples[index]
        if label is None:
            raise DataError(
                problem,
                expected="the path of an image and a label that is one of the classes",
                fix="correct the row, or skip such rows: data.bad_samples: skip",
                code="E_LABEL",
            )
        return self._transform(self._read(file, str(file))), label


def load_images(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    decoder: Decoder = "pillow",
    shorter_side: int | None = None,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Return the images of a folder of class folders.

    `evaluation_path` is the folder of the validation images. Without it, the fraction `evaluation_fraction` of the
    images is split off by file names. The other options are fields of `ImageTransforms`; `augment` has those of
    `Augment`.

    Raises:
        InputError: a folder, its classes or their images are missing, or an option is invalid.
    """
    transforms = ImageTransforms(image_size, crop_fraction, interpolation, mean, std, decoder, shorter_side)
    augmentation = parse_augment(augment)
    classes, train, notes = _scan(Path(path))
    if evaluation_path is None:
        names = [sample.file.relative_to(path).as_posix() for sample in train]
        train, validation = _split(train, names, evaluation_fraction, classes)
    else:
        validation_classes, validation, validation_notes = _scan(Path(evaluation_path))
        notes += validation_notes
        if validation_classes != classes:
            raise DataError(
                f"{evaluation_path} has the classes {', '.join(validation_classes)}, {path} has {', '.join(classes)}",
                expected="equal class folders in both",
                fix="rename the class folders, or correct data.options.evaluation_path",
                code="E_CLASSES",
            )
    return replace(_splits(train, validation, classes, transforms, augmentation), notes=notes)


def image_task(
    classes: Sequence[str],
    *,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    decoder: Decoder = "pillow",
    shorter_side: int | None = None,
) -> Task:
    """Return the task that classifies an image file."""
    transforms = ImageTransforms(image_size, crop_fraction, interpolation, mean, std, decoder, shorter_side)
    read, transform = transforms.reader(), transforms.validation()
    return Task(
        reads="an image file",
        read=lambda path: transforms.normalize(transform(read(path, str(path)))),
        describe=lambda logits: top_classes(logits, classes, count=5),
    )


def load_image_list(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    image_root: str | None = None,
    path_column: str = "path",
    label_column: str = "label",
    labels: Labels | None = None,
    classes: Sequence[str] | None = None,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    decoder: Decoder = "pillow",
    shorter_side: int | None = None,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Return the images of a list; see `samestep.zoo.tables` for its formats, and `load_images` for common options.

    Relative paths begin in `image_root`, by default the folder of the list. With `labels="numbers"`, the default for
    `.txt`, labels are class numbers from 0. `classes` has the class names; by default the sorted labels, or 0 to the
    largest number.

    Raises:
        InputError: a table is missing or damaged, or an option is invalid.
    """
    transforms = ImageTransforms(image_size, crop_fraction, interpolation, mean, std, decoder, shorter_side)
    augmentation = parse_augment(augment)
    columns, rows = (path_column, label_column), read_table(Path(path))
    if labels is None:
        labels = "numbers" if Path(path).suffix.lower() == ".txt" else "names"
    names = _classes(path, rows, columns, labels, classes)
    numbers = {label_text(name): number for number, name in enumerate(names)}

    def class_number(text: str) -> int | None:
        if labels == "names":
            return numbers.get(text)
        return int(text) if _is_class_number(text) and int(text) < len(names) else None

    def samples(rows: list[Row], table: str) -> list[Sample]:
        _require_columns(rows, table, columns)
        folder = Path(table).parent if image_root is None else Path(image_root)
        return [_sample(row, folder, columns, class_number) for row in rows]

    train = samples(rows, path)
    if evaluation_path is not None:
        validation = samples(read_table(Path(evaluation_path)), evaluation_path)
    else:
        train, validation = _split(train, _keys(train, rows, path_column), evaluation_fraction, names)
    return _splits(train, validation, names, transforms, augmentation)


def _split(
    samples: list[Sample], keys: list[str], fraction: float, classes: Sequence[str]
) -> tuple[list[Sample], list[Sample]]:
    labels = [sample.label for sample in samples]
    parts = train_validation_split(keys, fraction, unit="image", labels=labels, classes=classes)
    train, validation = ([samples[index] for index in indices] for indices in parts)
    return train, validation


def _splits(
    train: list[Sample],
    validation: list[Sample],
    classes: Sequence[str],
    transforms: ImageTransforms,
    augmentation: Augment,
) -> Splits:
    read = transforms.reader()
    files = [sample.file for sample in (*train, *validation) if sample.label is not None]
    return transforms.splits(
        ImageFiles(train, read, transforms.train(augmentation)),
        ImageFiles(validation, read, transforms.validation()),
        classes,
        augmentation,
        partial(open_cache, read, files),
        fingerprint=fingerprint_of([str(sample.file) for sample in train], []),
    )


def _scan(root: Path) -> tuple[list[str], list[Sample], tuple[str, ...]]:
    """Return the class names and the images of a folder of class folders, and notes about other files."""
    require_path(root, "folder", "data.options.path is a folder of class folders")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"{root} has {len(classes)} class folders",
            expected="at least two class folders",
            fix=f"move images to {root}/CLASS/IMAGE.jpg",
            code="E_CLASSES",
        )
    if set(classes) <= _SPLIT_NAMES:
        first, *others = sorted(classes, key=lambda name: name != "train")
        raise DataError(
            f"the class folders of {root} are {', '.join(classes)}, which are names of splits",
            expected="a folder with one folder per class",
            fix=f"data.options.path={root / first} data.options.evaluation_path={root / others[-1]}",
            code="E_CLASSES",
        )
    samples: list[Sample] = []
    no_images: list[Path] = []
    for number, name in enumerate(classes):
        files, left_out = by_suffix(files_below(root / name), IMAGE_SUFFIXES)
        if not files:
            raise DataError(
                f"class {name!r} has no images in {root / name}",
                expected=f"files that end in {', '.join(IMAGE_SUFFIXES)}",
                fix="remove the folder, or add images",
                code="E_CLASSES",
            )
        samples += [Sample(file, number) for file in files]
        no_images += left_out
    return classes, samples, left_out_notes(root, no_images, IMAGE_SUFFIXES)


def _classes(
    path: str, rows: list[Row], columns: tuple[str, str], labels: Labels, classes: Sequence[str] | None
) -> tuple[str, ...]:
    is_known = labels in ("names", "numbers")
    require(is_known, f"data.options.labels is {labels!r}", "names or numbers", "set data.options.labels: names")
    if classes is not None:
        values = classes if isinstance(classes, list | tuple) else ()
        require_no_booleans(values)
        names = [str(name) for name in values]
        require(
            len(names) >= 2 and len({label_text(name) for name in names}) == len(names),
            f"data.options.classes is {classes!r}",
            "a list of at least two different names",
            "set data.options.classes: [cat, dog]",
            code="E_CLASSES",
        )
        return tuple(names)
    _require_columns(rows, path, columns)
    labels_of_rows = (label_text(row.values.get(columns[1])) for row in rows if not row.problem)
    texts = {text for text in labels_of_rows if text and not text_problem(text)}
    if labels == "numbers":
        largest = max((int(text) for text in texts if _is_class_number(text)), default=-1)
        names = [str(number) for number in range(largest + 1)]
    else:
        names = sorted(texts)
    if len(names) < 2:
        raise DataError(
            f"{path} has {len(names)} classes in column {columns[1]!r}",
            expected="at least two classes",
            fix="correct data.options.label_column, or set data.options.classes",
            code="E_CLASSES",
        )
    return tuple(names)


def _keys(samples: list[Sample], rows: list[Row], column: str) -> list[str]:
    """Return the path of each row as in the list; rows of one image have the first of its paths."""
    keys = [str(row.values.get(column)) for row in rows]
    first: dict[str, str] = {}
    for number, sample in enumerate(samples):
        if sample.file.name:  # the row has a path
            keys[number] = first.setdefault(os.path.abspath(sample.file), keys[number])
    return keys


def _sample(row: Row, root: Path, columns: tuple[str, str], class_number: Callable[[str], int | None]) -> Sample:
    path, text = row.values.get(columns[0]), label_text(row.values.get(columns[1]))
    if row.problem:
        return Sample(Path(), None, f"{row.where}: {row.problem}")
    if not isinstance(path, str) or not path or "\0" in path:
        return Sample(Path(), None, f"{row.where}: no path in {columns[0]!r}")
    if not text:
        return Sample(root / path, None, f"{row.where}: no label in {columns[1]!r}")
    label = class_number(text)
    return Sample(root / path, label, f"{row.where}: the label {text!r} is not a class" if label is None else "")


def _is_class_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,6}", text) is not None  # there is a name for each number up to the largest


def _require_columns(rows: list[Row], path: str, columns: tuple[str, str]) -> None:
    require_columns(rows, path, {"path_column": columns[0], "label_column": columns[1]})
