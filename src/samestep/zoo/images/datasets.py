"""Images in one folder per class, of a list with a path and a label per row, or of a dataset of Hugging Face."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samestep.data.folder_files import by_suffix, files_below, left_out_notes
from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError
from samestep.zoo.images.decoders import ReadImage
from samestep.zoo.images.files import IMAGE_SUFFIXES
from samestep.zoo.images.source import open_cache
from samestep.zoo.images.transforms import ImageTransforms, Transform, image_transforms
from samestep.zoo.options import require_option, require_path
from samestep.zoo.splits import (
    Splits,
    Task,
    label_text,
    require_no_booleans,
    top_classes,
    train_validation_split,
)
from samestep.zoo.tables import Row, read_table, require_columns

_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


class Sample(NamedTuple):
    """One image. An unusable row of a list or a dataset raises its error on access."""

    source: Path | BytesIO
    label: int | None  # class number; None for an unusable row
    problem: str = ""  # list, line, and reason why the row cannot be used; empty for other rows
    name: str = ""  # of the image in errors; empty for its path


class LabeledImages:
    """Images with class numbers, decoded and transformed on access."""

    def __init__(self, samples: Sequence[Sample], read: ReadImage, transform: Transform) -> None:
        self.samples = samples
        self._read = read
        self._transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source, label, problem, name = self.samples[index]
        if label is None:
            raise DataError(
                problem,
                expected="an image and a label that is one of the classes",
                fix="correct the row, or skip such rows: data.bad_samples: skip",
                code="E_CLASSES",
            )
        return self._transform(self._read(source, name or str(source))), label


def load_images(
    path: str, *, evaluation_path: str | None = None, evaluation_fraction: float = 0.2, **options: Any
) -> Splits:
    """Return the images of a folder of class folders.

    `evaluation_path` is the folder of the validation images. Without it, the fraction `evaluation_fraction` of the
    images is split off by file names. The other options are fields of `ImageTransforms`.

    Raises:
        InputError: a folder, its classes or their images are missing, or an option is invalid.
    """
    transforms = image_transforms(options, load_images)
    classes, train, notes = _scan(Path(path))
    if evaluation_path is None:
        names = [Path(str(sample.source)).relative_to(path).as_posix() for sample in train]
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
    return replace(_splits(train, validation, classes, transforms), notes=notes)


def image_task(classes: Sequence[str], **options: Any) -> Task:
    """Return the task that classifies an image file, with the fields of `ImageTransforms` among `options`."""
    names = {field.name for field in fields(ImageTransforms)} - {"augment"}
    transforms = image_transforms({name: options[name] for name in names & options.keys()}, image_task)
    read = transforms.reader()
    transform = transforms.validation()
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
    classes: Sequence[str] | None = None,
    **options: Any,
) -> Splits:
    """Return the images of a list; see `samestep.zoo.tables` for its formats, and `load_images` for other options.

    Relative paths begin in `image_root`, by default the folder of the list. Labels of a `.txt` are class numbers from
    0, those of other lists are names. `classes` has the class names; by default the sorted labels, or 0 to the largest
    number.

    Raises:
        InputError: a table is missing or damaged, or an option is invalid.
    """
    transforms = image_transforms(options, load_image_list)
    columns = (path_column, label_column)
    rows = read_table(Path(path))
    is_numbered = Path(path).suffix.lower() == ".txt"
    names = _named_classes(classes) if classes is not None else _classes_of(path, rows, columns, is_numbered)
    keys = map(str, range(len(names))) if is_numbered else map(label_text, names)
    numbers = {key: number for number, key in enumerate(keys)}

    def samples(rows: list[Row], table: str) -> list[Sample]:
        _require_columns(rows, table, columns)
        folder = Path(table).parent if image_root is None else Path(image_root)
        return [_sample(row, folder, columns, numbers) for row in rows]

    train = samples(rows, path)
    if evaluation_path is not None:
        validation = samples(read_table(Path(evaluation_path)), evaluation_path)
    else:
        train, validation = _split(train, _keys(train, rows, path_column), evaluation_fraction, names)
    return _splits(train, validation, names, transforms)


def _split(
    samples: list[Sample], keys: list[str], fraction: float, classes: Sequence[str]
) -> tuple[list[Sample], list[Sample]]:
    labels = [sample.label for sample in samples]
    parts = train_validation_split(keys, fraction, unit="image", labels=labels, classes=classes)
    train, validation = ([samples[index] for index in indices] for indices in parts)
    return train, validation


def _splits(
    train: list[Sample], validation: list[Sample], classes: Sequence[str], transforms: ImageTransforms
) -> Splits:
    read = transforms.reader()
    usable = [sample.source for sample in (*train, *validation) if sample.label is not None]
    files = [source for source in usable if isinstance(source, Path)]
    return transforms.splits(
        LabeledImages(train, read, transforms.train()),
        LabeledImages(validation, read, transforms.validation()),
        classes,
        open_cache=partial(open_cache, read, files),
        fingerprint=fingerprint_of([str(sample.source) for sample in train], []),
    )


def _scan(root: Path) -> tuple[list[str], list[Sample], tuple[str, ...]]:
    """Return the class names and the images of a folder of class folders, and notes about other files."""
    require_path(root, "folder", "data.options.path is a folder of class folders")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise _invalid_classes(f"{root} has {len(classes)} class folders", f"move images to {root}/CLASS/IMAGE.jpg")
    if set(classes) <= _SPLIT_NAMES:
        first, *others = sorted(classes, key=lambda name: name != "train")
        raise _invalid_classes(
            f"the class folders of {root} are {', '.join(classes)}, which are names of splits",
            f"data.options.path={root / first} data.options.evaluation_path={root / others[-1]}",
        )
    samples: list[Sample] = []
    no_images: list[Path] = []
    for number, name in enumerate(classes):
        files, left_out = by_suffix(files_below(root / name), IMAGE_SUFFIXES)
        if not files:
            raise _invalid_classes(
                f"class {name!r} has no images that end in {', '.join(IMAGE_SUFFIXES)}",
                f"remove the folder {root / name}, or add images",
            )
        samples += [Sample(file, number) for file in files]
        no_images += left_out
    return classes, samples, left_out_notes(root, no_images, IMAGE_SUFFIXES)


def _named_classes(classes: object) -> list[str]:
    values = classes if isinstance(classes, list | tuple) else ()
    require_no_booleans(values)
    names = [str(name) for name in values]
    is_valid = len(names) >= 2 and len({label_text(name) for name in names}) == len(names)
    require_option("classes", classes, is_valid, "a list of at least two different names", "[cat, dog]")
    return names


def _classes_of(path: str, rows: list[Row], columns: tuple[str, str], is_numbered: bool) -> list[str]:
    """Return the sorted labels of a list, or the numbers from 0 to its largest one."""
    _require_columns(rows, path, columns)
    names = sorted({label_text(row.values.get(columns[1])) for row in rows if not row.problem} - {""})
    if is_numbered:
        numbers = [int(text) for text in names if re.fullmatch("[0-9]{1,6}", text)]
        names = [str(number) for number in range(max(numbers, default=-1) + 1)]
    if len(names) < 2:
        raise _invalid_classes(
            f"{path} has {len(names)} classes in column {columns[1]!r}",
            "correct data.options.label_column, or set data.options.classes",
        )
    return names


def _invalid_classes(problem: str, fix: str) -> DataError:
    return DataError(problem, expected="at least two classes with images", fix=fix, code="E_CLASSES")


def _keys(samples: list[Sample], rows: list[Row], column: str) -> list[str]:
    """Return the path of each row as in the list; rows of one image have the first of its paths."""
    keys = [str(row.values.get(column)) for row in rows]
    first: dict[str, str] = {}
    for number, sample in enumerate(samples):
        if isinstance(sample.source, Path) and sample.source.name:  # the row has a path
            keys[number] = first.setdefault(os.path.abspath(sample.source), keys[number])
    return keys


def _sample(row: Row, root: Path, columns: tuple[str, str], numbers: Mapping[str, int]) -> Sample:
    path = row.values.get(columns[0])
    text = label_text(row.values.get(columns[1]))
    if row.problem:
        return Sample(Path(), None, f"{row.where}: {row.problem}")
    if not isinstance(path, str) or not path or "\0" in path:
        return Sample(Path(), None, f"{row.where}: no path in {columns[0]!r}")
    if not text:
        return Sample(root / path, None, f"{row.where}: no label in {columns[1]!r}")
    label = numbers.get(text)
    problem = f"{row.where}: the label {text!r} is not a class" if label is None else ""
    return Sample(root / path, label, problem)


def _require_columns(rows: list[Row], path: str, columns: tuple[str, str]) -> None:
    require_columns(rows, path, {"path_column": columns[0], "label_column": columns[1]})
