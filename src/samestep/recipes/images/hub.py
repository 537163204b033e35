"""Images in a dataset that Hugging Face's `datasets` saved on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from samestep.errors import DataError, RecipeError
from samestep.recipes.images.augment import augment_of
from samestep.recipes.images.decode import decode, read_image
from samestep.recipes.images.view import MEAN, STD, Transform, View
from samestep.recipes.kept_apart import kept_apart
from samestep.recipes.splits import Splits


class HubImages:
    """Rows of a table with an encoded image and a class number, decoded and transformed when asked for.

    Args:
        rows: of `datasets`, the image column not decoded.
        labels: the class number of each row, None for what is no class.
        positions: the rows that belong here.
        name: of the table, for errors.
    """

    def __init__(
        self,
        rows: Any,
        labels: Sequence[int | None],
        positions: Sequence[int],
        *,
        name: str,
        columns: tuple[str, str],
        transform: Transform,
    ) -> None:
        self._rows, self._labels, self._positions = rows, labels, positions
        self._name, self._columns, self._transform = name, columns, transform

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        position = self._positions[index]
        image_column, label_column = self._columns
        label, where = self._labels[position], f"{self._name}, row {position}"
        row = self._rows[position]
        if label is None:
            raise DataError(
                f"{where}: the label {row[label_column]!r} is no class",
                rule="every row has a label that is one of the classes",
                do="correct the row; or leave such rows out: data.bad_samples: skip",
            )
        found = row[image_column]
        if found is None or (found["bytes"] is None and found["path"] is None):
            raise DataError(
                f"{where}: no image",
                rule="every row has an image",
                do="remove the row; or leave such rows out: data.bad_samples: skip",
            )
        if found["bytes"] is None:
            return self._transform(read_image(Path(found["path"]))), label
        called = f"{where} ({found['path']})" if found["path"] else where
        return self._transform(decode(BytesIO(found["bytes"]), called)), label


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
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """A dataset that `save_to_disk` wrote.

    Args:
        path: its folder.
        train_split: what to train on; a dataset without splits is taken as it is.
        evaluation_split: what to evaluate on; None, or a dataset without splits: a part is kept apart.
        evaluation_fraction: how much of each class is kept apart then, by a hash of row numbers.
        image_column: a column of `datasets.Image`.
        label_column: a `datasets.ClassLabel`, whose names are the classes; or text, whose sorted values are.
        image_size: pixels of the square that the model sees; this and the next four as in `View`.
        augment: options of `Augment`; None for a random crop and flip.

    Raises:
        InputError: there is no such dataset, split or column, or an option cannot be.
    """
    view = View(image_size=image_size, crop_fraction=crop_fraction, interpolation=interpolation, mean=mean, std=std)
    wanted = augment_of(augment)
    columns = (image_column, label_column)
    tables = _load(path)
    own = _table(tables, path, train_split, columns)
    classes = _classes(own, label_column, path)
    labels = _labels(own, label_column, classes)
    if evaluation_split is None or not isinstance(tables, Mapping):
        train, evaluation = kept_apart(list(map(str, range(len(own)))), labels, classes, evaluation_fraction)
        other, others, where = own, labels, train_split
    else:
        other = _table(tables, path, evaluation_split, columns)
        others, where = _labels(other, label_column, classes), evaluation_split
        train, evaluation = list(range(len(own))), list(range(len(other)))
    suffix = isinstance(tables, Mapping)
    trained, evaluated = (f"{path}/{split}" if suffix else path for split in (train_split, where))
    training, evaluating = view.training(wanted), view.evaluating()
    return Splits(
        train=HubImages(own, labels, train, name=trained, columns=columns, transform=training),
        evaluation=HubImages(other, others, evaluation, name=evaluated, columns=columns, transform=evaluating),
        classes=classes,
        reads_files=True,
        train_collate=wanted.mixing(len(classes)),
    )


def _load(path: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"data.name hub_images needs {error.name}",
            rule="it is not installed with Samestep",
            do="pip install 'samestep[zoo]'",
        ) from error
    if not hasattr(datasets, "load_from_disk"):
        raise RecipeError(
            f"the module datasets is {getattr(datasets, '__file__', 'a folder')}",
            rule="data.name hub_images needs the library of that name",
            do="give your own module another name; pip install 'samestep[zoo]'",
        )
    if not Path(path).is_dir():
        raise DataError(f"there is no folder {path}", rule="a folder that save_to_disk wrote", do="look at the path")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # readers of damaged files raise of many kinds, each of them means this
        raise DataError(
            f"{path} cannot be read as a dataset: {error}",
            rule="a folder that save_to_disk of Hugging Face's datasets wrote",
            do="save it again: dataset.save_to_disk(FOLDER)",
        ) from error


def _table(tables: Any, path: str, split: str, columns: tuple[str, str]) -> Any:
    """One split, its images not decoded, so that one that is damaged can be named."""
    image = import_module("datasets").Image
    if isinstance(tables, Mapping):
        if split not in tables:
            raise DataError(
                f"{path} has no split {split!r}",
                rule=f"splits here: {', '.join(tables)}",
                do="set data.options.train_split and data.options.evaluation_split; the latter null keeps a part of "
                "the former apart",
            )
        tables = tables[split]
    for name in columns:
        if name not in tables.column_names:
            raise DataError(
                f"{path} has no column {name!r}",
                rule=f"columns here: {', '.join(tables.column_names)}",
                do="set data.options.image_column and data.options.label_column",
            )
    if not isinstance(tables.features[columns[0]], image):
        raise DataError(
            f"the column {columns[0]!r} of {path} is {tables.features[columns[0]]}",
            rule="a column of datasets.Image",
            do="dataset.cast_column(NAME, datasets.Image()), and save it again",
        )
    return tables.cast_column(columns[0], image(decode=False))


def _classes(table: Any, column: str, path: str) -> tuple[str, ...]:
    feature = table.features[column]
    if isinstance(feature, import_module("datasets").ClassLabel):
        classes = tuple(feature.names)
    elif feature.dtype in ("string", "large_string"):
        classes = tuple(sorted({text for text in table[column] if text}))
    else:
        raise DataError(
            f"the column {column!r} of {path} is {feature}",
            rule="a datasets.ClassLabel, or text",
            do="dataset.cast_column(NAME, datasets.ClassLabel(names=[...])), and save it again",
        )
    if len(classes) < 2:
        raise DataError(f"{path} has {len(classes)} classes", rule="at least two", do="look at the label column")
    return classes


def _labels(table: Any, column: str, classes: tuple[str, ...]) -> list[int | None]:
    numbers = {name: number for number, name in enumerate(classes)}
    found: list[int | None] = []
    for value in table[column]:
        if isinstance(value, str):
            found.append(numbers.get(value))
        else:
            found.append(value if value is not None and 0 <= value < len(classes) else None)
    return found
