"""Images for classification: class folders, lists, datasets of Hugging Face, and streams."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from samestep.data.sample_files import by_suffix, files_below, fingerprint_of
from samestep.data.stream_formats import ParquetFiles
from samestep.data.streams import DEFAULT_WINDOW, StreamDataset
from samestep.errors import DataError
from samestep.zoo.image_files import IMAGE_SUFFIXES, read_image
from samestep.zoo.image_transforms import ImageTransforms, Transform, image_transforms
from samestep.zoo.labels import ClassLabels, Row, class_names, label_text, read_table
from samestep.zoo.options import (
    import_optional,
    require_count,
    require_path,
    unusable,
)
from samestep.zoo.splits import ConvertedSource, Splits, Task, top_classes, train_validation_split

_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


class Sample(NamedTuple):
    """One image. An unusable row of a list or a dataset raises its error on access."""

    source: Path | BytesIO
    label: int | None  # class number; None for an unusable row
    error: DataError | None = None  # of an unusable row
    name: str = ""  # of the image in errors; empty for its path


class LabeledImages:
    """Images with class numbers, decoded and transformed on access."""

    def __init__(self, samples: Sequence[Sample], transform: Transform) -> None:
        self.samples = samples
        self._transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source, label, error, name = self.samples[index]
        if error is not None or label is None:
            raise error or _unusable("no label")
        return self._transform(read_image(source, name)), label


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
    transforms = image_transforms(options, load_images)
    classes, train = _scan(Path(path))
    if evaluation_path is None:
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
    names = {field.name for field in fields(ImageTransforms)} - {"augment"}
    known = {name: options[name] for name in names & options.keys()}
    transforms = image_transforms(known, image_task)
    transform = transforms.validation()
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
    transforms = image_transforms(options, load_image_list)
    read = partial(
        read_table, text_column=path_column, label_column=label_column, option="path_column"
    )
    rows = read(path)
    texts = sorted({row.label for row in rows} - {""})
    if Path(path).suffix.lower() == ".txt":
        largest = max((int(label) for label in texts if label.isdecimal()), default=-1)
        texts = [str(number) for number in range(largest + 1)]
    if classes is None:
        classes = texts
    names = class_names(classes)
    labels = ClassLabels(names)

    def sample(row: Row, table: str) -> Sample:
        root = Path(table).parent if image_root is None else Path(image_root)
        source = root / row.text
        if row.problem:
            return Sample(source, None, _unusable(f"{row.where}: {row.problem}"))
        try:
            return Sample(source, labels.number(row.label, row.where))
        except DataError as error:
            return Sample(source, None, error)

    train = [sample(row, path) for row in rows]
    if evaluation_path is not None:
        validation = [sample(row, evaluation_path) for row in read(evaluation_path)]
    else:
        train, validation = _split(train, _keys(train, rows), evaluation_fraction, names)
    return _splits(train, validation, names, transforms)


def _keys(samples: list[Sample], rows: list[Row]) -> list[str]:
    """Return the path of each row as in the list; rows of one image have the first of its paths."""
    paths = [os.path.abspath(str(sample.source)) for sample in samples]
    first: dict[str, str] = {}
    for path, row in zip(paths, rows, strict=True):
        if row.text:
            first.setdefault(path, row.text)
    return [first.get(path, row.text) for path, row in zip(paths, rows, strict=True)]


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
) -> Splits:
    return transforms.splits(
        LabeledImages(train, transforms.train()),
        LabeledImages(validation, transforms.validation()),
        classes,
        fingerprint=fingerprint_of([str(sample.source) for sample in train]),
    )


def _scan(root: Path) -> tuple[list[str], list[Sample]]:
    """Return the class names and the images of a folder of class folders."""
    require_path(root, "folder", "data.options.path is a folder of class folders")
    folders = [entry.name for entry in root.iterdir() if entry.is_dir()]
    classes = sorted(name for name in folders if not name.startswith("."))
    if len(classes) < 2:
        raise _invalid_classes(
            f"{root} has {len(classes)} class folders", f"move images to {root}/CLASS/IMAGE.jpg"
        )
    if set(classes) <= _SPLIT_NAMES:
        first, *others = sorted(classes, key=lambda name: name != "train")
        raise _invalid_classes(
            f"the class folders of {root} are {', '.join(classes)}, which are names of splits",
            f"data.options.path={root / first} data.options.evaluation_path={root / others[-1]}",
        )
    samples: list[Sample] = []
    for number, name in enumerate(classes):
        files = by_suffix(files_below(root / name), IMAGE_SUFFIXES)
        if not files:
            problem = f"class {name!r} has no images that end in {', '.join(IMAGE_SUFFIXES)}"
            raise _invalid_classes(problem, f"remove the folder {root / name}, or add images")
        samples += [Sample(file, number) for file in files]
    return classes, samples


def _invalid_classes(problem: str, fix: str) -> DataError:
    return DataError(problem, "at least two classes with images", fix, code="E_CLASSES")


def _unusable(problem: str) -> DataError:
    expected = "an image and a label that is one of the classes"
    return unusable(problem, expected, "correct the row", "E_CLASSES")


@dataclass(frozen=True)
class HubSamples(Sequence[Sample]):
    """Rows of a table with an encoded image and a label, read on access."""

    table: Any  # table of `datasets`, without decoding of the image column
    labels: Sequence[int | None]  # class number of each row, or None for an invalid label
    rows: Sequence[int]  # numbers of the rows to use
    name: str  # name of the table, for errors
    column: str  # name of the image column

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        number = self.rows[index]
        where = f"{self.name}, row {number}"
        image = self.table[number][self.column] or {"bytes": None, "path": None}
        if self.labels[number] is None:
            return Sample(Path(), None, _unusable(f"{where}: its label is not a class"))
        if image["bytes"] is None and image["path"] is None:
            return Sample(Path(), None, _unusable(f"{where}: no image"))
        source = Path(image["path"]) if image["bytes"] is None else BytesIO(image["bytes"])
        return Sample(source, self.labels[number], name=f"{where} ({image['path']})")


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

    For a dataset without splits, or if `evaluation_split` is None, the fraction
    `evaluation_fraction` of the rows is split off by their numbers. The image column has the type
    `datasets.Image`, the label column `datasets.ClassLabel` or text. The other options are fields
    of `ImageTransforms`.

    Raises:
        InputError: the dataset, a split or a column is missing, or an option is invalid.
    """
    transforms = image_transforms(options, load_hub_images)
    table, names, labels = _hub_table(path, train_split, image_column, label_column)
    classes = class_names(names)
    numbers = {name: number for number, name in enumerate(classes)}
    class_numbers = [numbers.get(label) for label in labels]
    rows: Sequence[int] = range(len(labels))
    if evaluation_split is None or not (Path(path) / "dataset_dict.json").exists():
        keys = [str(number) for number in rows]
        rows, others = train_validation_split(
            keys, evaluation_fraction, unit="image", labels=class_numbers, classes=classes
        )
        name = f"{path}/{train_split}"
        validation = HubSamples(table, class_numbers, others, name, image_column)
    else:
        other, _, labels = _hub_table(path, evaluation_split, image_column, label_column)
        name = f"{path}/{evaluation_split}"
        other_numbers = [numbers.get(label) for label in labels]
        validation = HubSamples(other, other_numbers, range(len(labels)), name, image_column)
    train = HubSamples(table, class_numbers, rows, f"{path}/{train_split}", image_column)
    return transforms.splits(
        LabeledImages(train, transforms.train()),
        LabeledImages(validation, transforms.validation()),
        classes,
        fingerprint=fingerprint_of([str(class_numbers[row]) for row in rows]),
    )


def _hub_table(
    path: str, split: str, image_column: str, label_column: str
) -> tuple[Any, list[str], list[str]]:
    """Return a split, its class names and the label of each row."""
    datasets = import_optional("datasets", "data.name hub_images")
    require_path(Path(path), "folder", "data.options.path is a folder written by save_to_disk")
    try:
        table = datasets.load_from_disk(path)
        if isinstance(table, Mapping):
            table = table[split]
        feature = table.features[label_column]
        if not isinstance(table.features[image_column], datasets.Image):
            raise TypeError(f"the column {image_column} is {table.features[image_column]}")
        # Images are decoded on access, for better errors.
        table = table.cast_column(image_column, datasets.Image(decode=False))
        values = table[label_column]
    except Exception as error:  # damaged files raise exceptions of many types
        raise DataError(
            f"{path} cannot be read as a dataset: {type(error).__name__}: {error}",
            expected=f"the split {split} with images in the column {image_column} and labels in "
            f"{label_column}",
            fix="set data.options.train_split, evaluation_split, image_column and label_column, or "
            "save the data again",
            code="E_UNREADABLE",
        ) from error
    names = list(getattr(feature, "names", ()))
    if names:
        known = dict(enumerate(names))
        return table, names, [known.get(value, "") for value in values]
    labels = [label_text(value) for value in values]
    return table, sorted({*labels} - {""}), labels


def load_stream_images(
    path: str,
    *,
    evaluation_path: str,
    classes: int | Sequence[str],
    image_column: str = "image",
    label_column: str = "label",
    window: int = DEFAULT_WINDOW,
    **options: Any,
) -> Splits:
    """Return the images of Parquet files, with the options of `docs/guides/streams.md`.

    The column of images has encoded images as bytes, or mappings with the key `bytes`; that of
    labels has class numbers or names, also as bytes. The other options are fields of
    `ImageTransforms`.

    Raises:
        InputError: the files cannot be read, or an option is invalid.
    """
    transforms = image_transforms(options, load_stream_images)
    require_count("window", window, 1, DEFAULT_WINDOW)
    columns = (image_column, label_column)
    if isinstance(classes, int):
        classes = [str(number) for number in range(classes)]
    names = class_names(classes)

    def source(address: str, transform: Transform) -> ConvertedSource:
        sample = _StreamSample(columns, ClassLabels(names), transform)
        return ConvertedSource(ParquetFiles(address, columns), sample)

    return transforms.splits(
        StreamDataset(source(path, transforms.train()), window=window),
        StreamDataset(source(evaluation_path, transforms.validation())),
        names,
    )


@dataclass(frozen=True)
class _StreamSample:
    """Function from a sample of a file and its place to an image and a class number."""

    columns: tuple[str, str]
    labels: ClassLabels
    transform: Transform

    def __call__(self, sample: Mapping[str, Any], place: str) -> tuple[torch.Tensor, int]:
        image, label = (sample.get(name) for name in self.columns)
        data = image.get("bytes") if isinstance(image, Mapping) else image
        if not isinstance(data, bytes) or label is None:
            raise DataError(
                f"{place} has no encoded image in {self.columns[0]!r} or no label in "
                f"{self.columns[1]!r}",
                expected="the bytes of an image file, and a label, in its columns: "
                f"{', '.join(sample)}",
                fix="set data.options.image_column and data.options.label_column, or write the "
                "files again",
                code="E_UNKNOWN_NAME",
            )
        if isinstance(label, bytes):
            label = label.decode(errors="replace")
        number = self.labels.number(label, place)
        return self.transform(read_image(BytesIO(data), place)), number
