"""Images for classification: class folders and lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samestep.config.validation import require_path
from samestep.errors import DataError
from samestep.zoo.data_files import files_below, fingerprint_of
from samestep.zoo.image_files import IMAGE_SUFFIXES, read_image
from samestep.zoo.image_transforms import ImageTransforms, Transform
from samestep.zoo.labels import ClassLabels, Row, class_names, read_table
from samestep.zoo.options import unusable, validated
from samestep.zoo.splits import Splits, Task, top_classes
from samestep.zoo.validation_split import train_validation_split

_MAX_DIGITS = 6  # of a class number
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


class Sample(NamedTuple):
    """One image."""

    source: Path
    label: int | DataError  # class number; the error of an unusable row, which is raised on access


class LabeledImages:
    """Images with class numbers, decoded and transformed on access."""

    def __init__(self, samples: Sequence[Sample], transform: Transform) -> None:
        self.samples = samples
        self._transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source, label = self.samples[index]
        if isinstance(label, DataError):
            raise label
        return self._transform(read_image(source)), label


def load_images(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    **options: Any,
) -> Splits:
    """Return the images of a folder of class folders.

    `evaluation_path` is the folder of the validation images. Without it, the fraction
    `evaluation_fraction` of the images is split off by file names. The other options are fields of
    `ImageTransforms`.

    Raises:
        InputError: a folder, its classes or their images are missing, or an option is invalid.
    """
    transforms = validated(ImageTransforms, options, loader=load_images)
    classes, train = _scan(Path(path))
    if evaluation_path is None:
        # Without the path of the folder: data that move keep the split.
        names = [Path(str(sample.source)).relative_to(path).as_posix() for sample in train]
        train, validation = _split(train, names, evaluation_fraction, classes)
    else:
        validation_classes, validation = _scan(Path(evaluation_path))
        if validation_classes != classes:
            single = ", ".join(sorted({*validation_classes} ^ {*classes}))
            raise _invalid_classes(
                f"the class folders {single} are only in one of {path} and {evaluation_path}",
                "rename the class folders, or correct data.options.evaluation_path",
            )
    return _splits(train, validation, classes, transforms)


def image_task(classes: Sequence[str], **options: Any) -> Task:
    """Return the task that classifies an image file; `options` are those of the data."""
    # Other options name files, which predictions do not need.
    names = {field.name for field in fields(ImageTransforms)} - {"augment"}
    known = {name: options[name] for name in names & options.keys()}
    transform = validated(ImageTransforms, known).validation()
    return Task(
        reads="an image file",
        read=lambda path: transform(read_image(path)),
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
    """Return the images of a list; see `read_table` for its formats.

    The options are those of `load_images`, and others: relative paths begin in
    `image_root`, by default the folder of the list. Labels of a `.txt` are class numbers from 0,
    those of other lists are names. `classes` has the class names; by default the sorted labels, or
    0 to the largest number.

    Raises:
        InputError: a table is missing or damaged, or an option is invalid.
    """
    transforms = validated(ImageTransforms, options, loader=load_image_list)
    read = partial(
        read_table, text_column=path_column, label_column=label_column, option="path_column"
    )
    rows = read(path)
    texts = sorted({row.label for row in rows} - {""})
    if classes is None and Path(path).suffix.lower() == ".txt":
        # A damaged row can have any number of digits; the row is then a bad sample.
        usual = [label for label in texts if label.isdecimal() and len(label) <= _MAX_DIGITS]
        largest = max(map(int, usual), default=-1)
        classes = [str(number) for number in range(largest + 1)]
    if classes is None:
        classes = texts
    names = class_names(classes)
    labels = ClassLabels(names)

    def sample(row: Row, table: str) -> Sample:
        root = Path(table).parent if image_root is None else Path(image_root)
        source = root / row.text
        if row.problem:
            expected = "an image and a label that is one of the classes"
            problem = f"{row.where}: {row.problem}"
            return Sample(source, unusable(problem, expected, "correct the row", "E_CLASSES"))
        try:
            return Sample(source, labels.number(row.label, row.where))
        except DataError as error:
            return Sample(source, error)

    train = [sample(row, path) for row in rows]
    if evaluation_path is not None:
        validation = [sample(row, evaluation_path) for row in read(evaluation_path)]
    else:
        keys = [row.text for row in rows]
        train, validation = _split(train, keys, evaluation_fraction, names)
    return _splits(train, validation, names, transforms)


def _split(
    samples: list[Sample], keys: list[str], fraction: float, classes: Sequence[str]
) -> tuple[list[Sample], list[Sample]]:
    # Unusable rows are split by their keys alone.
    labels = [sample.label if isinstance(sample.label, int) else None for sample in samples]
    parts = train_validation_split(keys, fraction, unit="image", labels=labels, classes=classes)
    train, validation = ([samples[index] for index in indices] for indices in parts)
    return train, validation


def _splits(
    train: list[Sample],
    validation: list[Sample],
    classes: Sequence[str],
    transforms: ImageTransforms,
) -> Splits:
    return Splits(
        train=LabeledImages(train, transforms.train()),
        evaluation=LabeledImages(validation, transforms.validation()),
        classes=tuple(classes),
        reads_files=True,
        train_collate=transforms.augmentation.collate(len(classes)),
        fingerprint=fingerprint_of([str(sample.source) for sample in train]),
    )


def _scan(root: Path) -> tuple[list[str], list[Sample]]:
    """Return the class names and the images of a folder of class folders."""
    require_path(root, "folder", "data.options.path is a folder of class folders")
    folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    # Sorted: class numbers must not depend on the order of a disk.
    classes = sorted(name for name in folders if not name.startswith("."))
    if len(classes) < 2:
        raise _invalid_classes(
            f"{root} has {len(classes)} class folders", f"move images to {root}/CLASS/IMAGE.jpg"
        )
    # Otherwise the model would learn to tell training images from validation images.
    if set(classes) <= _SPLIT_NAMES:
        first, *others = sorted(classes, key=lambda name: name != "train")
        raise _invalid_classes(
            f"the class folders of {root} are {', '.join(classes)}, which are names of splits",
            f"data.options.path={root / first} data.options.evaluation_path={root / others[-1]}",
        )
    samples: list[Sample] = []
    for number, name in enumerate(classes):
        files = files_below(root / name, IMAGE_SUFFIXES)
        if not files:
            problem = f"class {name!r} has no images that end in {', '.join(IMAGE_SUFFIXES)}"
            raise _invalid_classes(problem, f"remove the folder {root / name}, or add images")
        samples += [Sample(file, number) for file in files]
    return classes, samples


def _invalid_classes(problem: str, fix: str) -> DataError:
    return DataError(problem, "at least two classes with images", fix, code="E_CLASSES")
