"""Images in sample files: encoded images with labels, in a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from operator import index
from typing import Any, Literal, get_args

import torch

from samestep.data.streams.dataset import DEFAULT_WINDOW, StreamDataset
from samestep.data.streams.source import SampleFiles
from samestep.data.streams.tables import ArrowFiles, ParquetFiles
from samestep.data.streams.tar import TarFiles
from samestep.errors import DataError
from samestep.zoo.images.decoders import DecodedImage
from samestep.zoo.images.source import ImageSource
from samestep.zoo.images.transforms import Transform, image_transforms
from samestep.zoo.options import require_count, require_option
from samestep.zoo.splits import ClassLabels, Splits, require_no_booleans
from samestep.zoo.streams import ConvertedSource

Format = Literal["webdataset", "parquet", "arrow"]


def load_stream_images(
    path: str,
    *,
    evaluation_path: str,
    classes: int | Sequence[str],
    format: Format = "parquet",
    image_column: str = "image",
    label_column: str = "label",
    window: int = DEFAULT_WINDOW,
    **options: Any,
) -> Splits:
    """Return the images of sample files, with the options of `docs/guides/streams.md`.

    The column of images has encoded images as bytes, or mappings with the key `bytes`; that of labels has class numbers
    or names, also as bytes. The other options are fields of `ImageTransforms`.

    Raises:
        InputError: the files cannot be read, or an option is invalid.
    """
    transforms = image_transforms(options, load_stream_images)
    require_count("window", window, 1, DEFAULT_WINDOW)
    require_option("format", format, format in get_args(Format), "webdataset, parquet or arrow", "parquet")
    reader = transforms.reader()
    names = _class_names(classes)
    labels = ClassLabels(names)
    columns = (image_column, label_column)
    convert = partial(_convert, columns=columns, reader=reader, labels=labels)
    train = ConvertedSource(_open_files(path, format, columns), partial(convert, transform=transforms.train()))
    evaluation = ConvertedSource(
        _open_files(evaluation_path, format, columns), partial(convert, transform=transforms.validation())
    )
    return transforms.splits(StreamDataset(train, window=window), StreamDataset(evaluation), names)


def _open_files(path: str, format: Format, columns: Sequence[str]) -> SampleFiles:
    if format == "webdataset":
        return TarFiles(path)
    return ParquetFiles(path, columns) if format == "parquet" else ArrowFiles(path, columns)


def _class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    values = range(classes) if isinstance(classes, int) else classes if isinstance(classes, list | tuple) else ()
    names = tuple(map(str, values))
    require_no_booleans(values)
    is_valid = len(set(names)) == len(names) >= 2
    require_option("classes", classes, is_valid, "at least two different names, or their number", "[cat, dog]")
    return names


def _convert(
    sample: Mapping[str, Any],
    place: str,
    *,
    columns: tuple[str, str],
    reader: ImageSource,
    labels: ClassLabels,
    transform: Transform,
) -> tuple[torch.Tensor, int]:
    """Return the transformed image and the class number of a sample."""
    for name, option in zip(columns, ("image_column", "label_column"), strict=True):
        if name not in sample:
            raise DataError(
                f"{place} has no column {name!r}",
                expected=f"one of its columns: {', '.join(sample)}",
                fix=f"set data.options.{option}",
                code="E_UNKNOWN_NAME",
            )
    image, label = (sample[name] for name in columns)
    return transform(_image(image, place, reader)), _class_number(label, place, labels)


def _image(value: Any, place: str, reader: ImageSource) -> DecodedImage:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if not isinstance(value, bytes):
        raise DataError(
            f"the image of {place} is a {type(value).__name__}",
            expected="an encoded image, such as the bytes of a JPEG file",
            fix="set data.options.image_column, or write the files again",
            code="E_UNKNOWN_NAME",
        )
    return reader(BytesIO(value), place)


def _class_number(value: Any, place: str, labels: ClassLabels) -> int:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    number = None
    with suppress(TypeError):  # no integer
        number = labels.number(text if isinstance(text, str) else index(text))
    if number is None:
        raise DataError(
            f"the label {value!r} of {place} is not a class",
            expected=labels.expected,
            fix="correct data.options.classes or the files, or skip such samples: data.bad_samples: skip",
            code="E_CLASSES",
        )
    return number
