"""Images of a dataset saved by Hugging Face's `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError
from samestep.zoo.images.datasets import LabeledImages, Sample
from samestep.zoo.images.transforms import image_transforms
from samestep.zoo.options import import_optional, require_path
from samestep.zoo.splits import Splits, train_validation_split


@dataclass(frozen=True)
class HubSamples(Sequence[Sample]):
    """Rows of a table with an encoded image and a class number, read on access."""

    table: Any  # table of `datasets`, without decoding of the image column
    labels: Sequence[int | None]  # class number of each row of the table, or None for an invalid label
    rows: Sequence[int]  # numbers of the rows to use
    name: str  # name of the table, for errors
    columns: tuple[str, str]  # names of the image and label columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        number = self.rows[index]
        where = f"{self.name}, row {number}"
        row = self.table[number]
        image, label = (row[column] for column in self.columns)
        if self.labels[number] is None:
            return Sample(Path(), None, f"{where}: the label {label!r} is not a class")
        if image is None or (image["bytes"] is None and image["path"] is None):
            return Sample(Path(), None, f"{where}: no image")
        if image["bytes"] is None:
            return Sample(Path(image["path"]), self.labels[number])
        name = f"{where} ({image['path']})" if image["path"] else where
        return Sample(BytesIO(image["bytes"]), self.labels[number], name=name)


def load_hub_images(
    path: str,
    *,
    train_split: str = "train",
    evaluation_split: str | None = "validation",
    evaluation_fraction: float = 0.2,
    image_column: str = "image",
    label_column: str = "label",
    **options: Any,
) -> Splits:
    """Return the images of a dataset written by `save_to_disk`.

    For a dataset without splits, or if `evaluation_split` is None, the fraction `evaluation_fraction` of the rows is
    split off by their numbers. The image column has the type `datasets.Image`, the label column
    `datasets.ClassLabel` or text. The other options are fields of `ImageTransforms`.

    Raises:
        InputError: the dataset, a split or a column is missing, or an option is invalid.
    """
    transforms = image_transforms(options, load_hub_images)
    columns = (image_column, label_column)
    tables = _load(path)
    table, name = _table(tables, path, train_split, columns)
    names = _label_names(table, label_column, path)
    classes = tuple(getattr(table.features[label_column], "names", sorted({text for text in names if text})))
    if len(classes) < 2:
        raise DataError(
            f"{path} has {len(classes)} classes in column {label_column!r}",
            expected="at least two classes",
            fix="correct data.options.label_column",
            code="E_CLASSES",
        )
    numbers = {label: number for number, label in enumerate(classes)}
    labels = [numbers.get(label) for label in names]
    if evaluation_split is None or not isinstance(tables, Mapping):
        keys = [str(number) for number in range(len(table))]
        parts = train_validation_split(keys, evaluation_fraction, unit="image", labels=labels, classes=classes)
        train, validation = (HubSamples(table, labels, rows, name, columns) for rows in parts)
    else:
        train = HubSamples(table, labels, range(len(table)), name, columns)
        table, name = _table(tables, path, evaluation_split, columns)
        labels_of_evaluation = [numbers.get(label) for label in _label_names(table, label_column, name)]
        validation = HubSamples(table, labels_of_evaluation, range(len(table)), name, columns)
    return transforms.splits(
        LabeledImages(train, transforms.reader(), transforms.train()),
        LabeledImages(validation, transforms.reader(), transforms.validation()),
        classes,
        fingerprint=fingerprint_of([str(labels[row]) for row in train.rows], []),
    )


def _load(path: str) -> Any:
    datasets = import_optional("datasets", "data.name hub_images")
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


def _table(tables: Any, path: str, split: str, columns: tuple[str, str]) -> tuple[Any, str]:
    """Return one split and its name. Its images are decoded on access, so that errors name the damaged row."""
    if isinstance(tables, Mapping):
        if split not in tables:
            raise DataError(
                f"{path} has no split {split!r}",
                expected=f"one of the splits {', '.join(tables)}",
                fix="set data.options.train_split and evaluation_split (null for a train/validation split)",
                code="E_UNKNOWN_NAME",
            )
        tables = tables[split]
        path = f"{path}/{split}"
    image = import_optional("datasets", "data.name hub_images").Image
    if not isinstance(tables.features.get(columns[0]), image) or columns[1] not in tables.features:
        raise DataError(
            f"{path} has the columns {dict(tables.features)}",
            expected=f"a column {columns[0]!r} of type datasets.Image, and a column {columns[1]!r}",
            fix="set data.options.image_column and data.options.label_column",
            code="E_UNKNOWN_NAME",
        )
    return tables.cast_column(columns[0], image(decode=False)), path


def _label_names(table: Any, column: str, path: str) -> list[str | None]:
    """Return the label of each row as text; None for an invalid one."""
    feature = table.features[column]
    if isinstance(feature, import_optional("datasets", "data.name hub_images").ClassLabel):
        return [feature.names[value] if value in range(len(feature.names)) else None for value in table[column]]
    if feature.dtype in ("string", "large_string"):
        return [text or None for text in table[column]]
    raise DataError(
        f"the column {column!r} of {path} is {feature}",
        expected="a column of type datasets.ClassLabel, or of text",
        fix="dataset.cast_column(NAME, datasets.ClassLabel(names=[...])), and save the dataset again",
        code="E_UNKNOWN_NAME",
    )
