"""Images in sample files: encoded images with labels, in a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any, Literal, get_args

import torch

from samestep.data.sample_files import SampleFiles
from samestep.data.stream_formats import ArrowFiles, ParquetFiles, TarFiles
from samestep.data.streams import DEFAULT_WINDOW, StreamDataset
from samestep.errors import DataError
from samestep.zoo.images.source import ImageSource
from samestep.zoo.images.transforms import Transform, image_transforms
from samestep.zoo.options import require_count, require_option
from samestep.zoo.splits import ClassLabels, Splits, class_names
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

    The column of images has encoded images as bytes, or mappings with the key `bytes`; that of
    labels has class numbers or names, also as bytes. The other options are fields of
    `ImageTransforms`.

    Raises:
        InputError: the files cannot be read, or an option is invalid.
    """
    transforms = image_transforms(options, load_stream_images)
    require_count("window", window, 1, DEFAULT_WINDOW)
    require_option(
        "format", format, format in get_args(Format), "webdataset, parquet or arrow", "parquet"
    )
    reader = transforms.reader()
    names = class_names(range(classes) if isinstance(classes, int) else classes)
    labels = ClassLabels(names)
    columns = (image_column, label_column)
    convert = partial(_convert, columns=columns, reader=reader, labels=labels)
    train = ConvertedSource(
        _open_files(path, format, columns), partial(convert, transform=transforms.train())
    )
    evaluation = ConvertedSource(
        _open_files(evaluation_path, format, columns),
        partial(convert, transform=transforms.validation()),
    )
    return transforms.splits(StreamDataset(train, window=window), StreamDataset(evaluation), names)


def _open_files(path: str, format: Format, columns: Sequence[str]) -> SampleFiles:
    if format == "webdataset":
        return TarFiles(path)
    if format == "parquet":
        return ParquetFiles(path, columns)
    return ArrowFiles(path, columns)


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
    image, label = (sample.get(name) for name in columns)
    data = image.get("bytes") if isinstance(image, Mapping) else image
    if not isinstance(data, bytes) or label is None:
        raise DataError(
            f"{place} has no encoded image in {columns[0]!r} or no label in {columns[1]!r}",
            expected=f"the bytes of an image file, and a label, in its columns: {', '.join(sample)}",
            fix="set data.options.image_column and data.options.label_column, or write the files again",
            code="E_UNKNOWN_NAME",
        )
    number = labels.number(
        label.decode(errors="replace") if isinstance(label, bytes) else label, place
    )
    return transform(reader(BytesIO(data), place)), number
