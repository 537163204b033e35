"""Images in sample files: encoded images with labels, in a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from operator import index
from typing import Any

import torch
from PIL import Image

from samestep.data.streams.dataset import DEFAULT_WINDOW, StreamDataset
from samestep.errors import DataError
from samestep.zoo.images.decoders import DecodedImage, Decoder, StoredImage, as_pixels
from samestep.zoo.images.rgb_conversion import to_rgb
from samestep.zoo.images.source import ImageSource
from samestep.zoo.images.transforms import MEAN, STD, ImageTransforms, Transform, parse_augment
from samestep.zoo.options import require_option
from samestep.zoo.splits import ClassLabels, Splits, require_no_booleans
from samestep.zoo.streams import open_files, open_stream

_TABLES = ("parquet", "arrow")  # formats that read single columns


def load_stream_images(
    path: str | None = None,
    *,
    evaluation_path: str,
    classes: int | Sequence[str],
    sources: Mapping[str, Any] | None = None,
    samples: int | None = None,
    format: str = "mds",
    image_column: str = "image",
    label_column: str = "label",
    window: int = DEFAULT_WINDOW,
    store: Mapping[str, Any] | None = None,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    decoder: Decoder = "pillow",
    shorter_side: int | None = None,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Return the images of sample files, with the options of `docs/guides/streams.md`.

    The column of images has encoded images as bytes, mappings with the key `bytes`, or images of Pillow; that of labels
    has class numbers or names, also as bytes. A tuple has the columns `0`, `1` and so on. The image options are those
    of `ImageTransforms` and `Augment`.

    Raises:
        InputError: the files cannot be read, or an option is invalid.
    """
    transforms = ImageTransforms(image_size, crop_fraction, interpolation, mean, std, decoder, shorter_side)
    augmentation, reader, names = parse_augment(augment), transforms.reader(), _class_names(classes)
    labels = ClassLabels(names)
    columns = (image_column, label_column)
    options = {"columns": list(columns)} if format in _TABLES else {}
    train, validation = (
        partial(_convert, columns=columns, reader=reader, labels=labels, transform=transform)
        for transform in (transforms.train(augmentation), transforms.validation())
    )
    return transforms.splits(
        open_stream(path, sources, format, options, train, window=window, samples=samples, store=store),
        StreamDataset(open_files(evaluation_path, format, options, validation, store=store)),
        names,
        augmentation,
    )


def _class_names(classes: int | Sequence[str]) -> tuple[str, ...]:
    values = range(classes) if isinstance(classes, int) else classes if isinstance(classes, list | tuple) else ()
    names = tuple(map(str, values))
    require_no_booleans(values)
    is_valid = len(set(names)) == len(names) >= 2
    require_option("classes", classes, is_valid, "at least two different names, or their number", "[cat, dog]")
    return names


def _convert(
    sample: Any,
    place: str,
    *,
    columns: tuple[str, str],
    reader: ImageSource,
    labels: ClassLabels,
    transform: Transform,
) -> tuple[torch.Tensor, int]:
    """Return the transformed image and the class number of a sample."""
    if isinstance(sample, list | tuple):
        sample = {str(number): value for number, value in enumerate(sample)}
    for name, option in zip(columns, ("image_column", "label_column"), strict=True):
        if not isinstance(sample, Mapping) or name not in sample:
            found = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
            raise DataError(
                f"{place} has no column {name!r}",
                expected=f"one of its columns: {found}",
                fix=f"set data.options.{option}",
                code="E_COLUMN",
            )
    image, label = (sample[name] for name in columns)
    return transform(_image(image, place, reader)), _class_number(label, place, labels)


def _image(value: Any, place: str, reader: ImageSource) -> DecodedImage:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, Image.Image):
        return reader.prepared(StoredImage(as_pixels(to_rgb(value))))
    if not isinstance(value, bytes):
        raise DataError(
            f"the image of {place} is a {type(value).__name__}",
            expected="an encoded image, such as the bytes of a JPEG file",
            fix="set data.options.image_column, or write the files again",
            code="E_COLUMN",
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
            expected=labels.expected(value),
            fix="correct data.options.classes or the files, or skip such samples: data.bad_samples: skip",
            code="E_LABEL",
        )
    return number
