"""Images of a dataset saved by Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError, RecipeError
from samestep.zoo.images.decoders import Decoder, ReadImage
from samestep.zoo.images.transforms import MEAN, STD, ImageTransforms, Transform, parse_augment
from samestep.zoo.options import import_optional, require_path
from samestep.zoo.splits import Splits, train_validation_split


@dataclass(frozen=True)
class HubImages:
    """Rows with an encoded image and a class number, decoded and transformed on access."""

    table: Any  # table of `datasets`, without decoding of the image column
    labels: Sequence[int | None]  # class number of each row, or None for an invalid label
    rows: Sequence[int]  # numbers of the rows to use
    name: str  # name of the table, for errors
    columns: tuple[str, str]  # names of the image and label columns
    read: ReadImage
    transform: Transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = self.rows[index]
        image_column, label_column = self.columns
        label, where = self.labels[number], f"{self.name}, row {number}"
        row = self.table[number]
        if label is None:
            raise DataError(
                f"{where}: the label {row[label_column]!r} is not a class",
                expected="a label that is one of the classes",
                fix="correct the row, or skip such rows: data.bad_samples: skip",
                code="E_LABEL",
            )
        image = row[image_column]
        if image is None or (image["bytes"] is None and image["path"] is None):
            raise DataError(
                f"{where}: no image",
                expected="an image in every row",
                fix="remove the row, or skip such rows: data.bad_samples: skip",
                code="E_LABEL",
            )
        if image["bytes"] is None:
            return self.transform(self.read(Path(image["path"]), image["path"])), label
        name = f"{where} ({image['path']})" if image["path"] else where
        return self.transform(self.read(BytesIO(image["bytes"]), name)), label


def load_hub_images(
    path: str,
    *,
    train_split: str = "train",
    evaluation_split: str | None = "validation",
    evaluation_fraction: float = 0.2,
    image_column: str = "image",
    label_column: str = "label",
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    decoder: Decoder = "pillow",
    shorter_side: int | None = None,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Return the images of a dataset written by `save_to_disk`.

    For a dataset without splits, or if `evaluation_split` is None, the fraction `evaluation_fraction` of the rows is
    split off by their numbers. The image column has the type `datasets.Image`, the label column
    `datasets.ClassLabel` or text. The other options are fields of `ImageTransforms`; `augment` has those of `Augment`.

    Raises:
        InputError: the dataset, a split or a column is missing, or an option is invalid.
    """
    transforms = ImageTransforms(image_size, crop_fraction, interpolation, mean, std, decoder, shorter_side)
    augmentation = parse_augment(augment)
    columns = (image_column, label_column)
    tables = _load(path)
    table = _table(tables, path, train_split, columns)
    classes = _classes(table, label_column, path)
    labels = _labels(table, label_column, classes, path)
    name = f"{path}/{train_split}" if isinstance(tables, Mapping) else path
    transform = transforms.train(augmentation)
    train = HubImages(table, labels, range(len(table)), name, columns, transforms.reader(), transform)
    validation = replace(train, transform=transforms.validation())
    if evaluation_split is None or not isinstance(tables, Mapping):
        keys = [str(number) for number in range(len(table))]
        parts = train_validation_split(keys, evaluation_fraction, unit="image", labels=labels, classes=classes)
        train, validation = replace(train, rows=parts[0]), replace(validation, rows=parts[1])
    else:
        table = _table(tables, path, evaluation_split, columns)
        name = f"{path}/{evaluation_split}"
        labels = _labels(table, label_column, classes, name)
        validation = replace(validation, table=table, labels=labels, rows=range(len(table)), name=name)
    fingerprint = fingerprint_of([str(train.labels[row]) for row in train.rows], [])
    return transforms.splits(train, validation, classes, augmentation, fingerprint=fingerprint)


def _load(path: str) -> Any:
    datasets = import_optional("datasets", "data.name hub_images")
    if not hasattr(datasets, "load_from_disk"):
        raise RecipeError(
            f"the module datasets is {getattr(datasets, '__file__', 'a folder')}",
            expected="the library of this name, for data.name hub_images",
            fix="rename your own module; pip install 'samestep[zoo]'",
            code="E_NOT_INSTALLED",
        )
    require_path(Path(path), "folder", "data.options.path is a folder written by save_to_disk")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # damaged files raise exceptions of many types
        raise DataError(
            f"{path} cannot be read as a dataset: {error}",
            expected="a folder written by save_to_disk of Hugging Face's datasets",
            fix="save the dataset again: dataset.save_to_disk(FOLDER)",
            code="E_UNREADABLE",
        ) from error


def _table(tables: Any, path: str, split: str, columns: tuple[str, str]) -> Any:
    """Return one split. Its images are decoded on access, so that errors name the damaged row."""
    image = import_optional("datasets", "data.name hub_images").Image
    if isinstance(tables, Mapping):
        if split not in tables:
            raise DataError(
                f"{path} has no split {split!r}",
                expected=f"one of the splits {', '.join(tables)}",
                fix="set data.options.train_split and evaluation_split (null for a train/validation split)",
                code="E_SPLIT",
            )
        tables = tables[split]
    for name in columns:
        if name not in tables.column_names:
            raise DataError(
                f"{path} has no column {name!r}",
                expected=f"one of the columns {', '.join(tables.column_names)}",
                fix="set data.options.image_column and data.options.label_column",
                code="E_COLUMN",
            )
    if not isinstance(tables.features[columns[0]], image):
        raise DataError(
            f"the column {columns[0]!r} of {path} is {tables.features[columns[0]]}",
            expected="a column of type datasets.Image",
            fix="dataset.cast_column(NAME, datasets.Image()), and save the dataset again",
            code="E_COLUMN",
        )
    return tables.cast_column(columns[0], image(decode=False))


def _classes(table: Any, column: str, path: str) -> tuple[str, ...]:
    feature = table.features[column]
    if isinstance(feature, import_optional("datasets", "data.name hub_images").ClassLabel):
        classes = tuple(feature.names)
    elif feature.dtype in ("string", "large_string"):
        classes = tuple(sorted({text for text in table[column] if text}))
    else:
        raise DataError(
            f"the column {column!r} of {path} is {feature}",
            expected="a column of type datasets.ClassLabel, or of text",
            fix="dataset.cast_column(NAME, datasets.ClassLabel(names=[...])), and save the dataset again",
            code="E_COLUMN",
        )
    if len(classes) < 2:
        raise DataError(
            f"{path} has {len(classes)} classes in column {column!r}",
            expected="at least two classes",
            fix="correct data.options.label_column",
            code="E_CLASSES",
        )
    return classes


def _labels(table: Any, column: str, classes: tuple[str, ...], path: str) -> list[int | None]:
    """Return class numbers of labels that are names or numbers; None for other labels.

    Numbers are those of the names of this table, whose order can differ from that of `classes`.
    """
    numbers: dict[Any, int] = {name: number for number, name in enumerate(classes)}
    names = getattr(table.features[column], "names", classes)  # of a `ClassLabel`
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise DataError(
            f"{path} has the classes {', '.join(names)}, the training data have {', '.join(classes)}",
            expected="classes of the training data, in any order",
            fix=f"rename or remove the class {unknown[0]!r}, and save the dataset again",
            code="E_CLASSES",
        )
    numbers |= {number: numbers[name] for number, name in enumerate(names)}
    return [numbers.get(value) for value in table[column]]
