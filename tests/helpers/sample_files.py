"""Folders of sample files for recipes, and small models for them."""

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch

from helpers.photos import SMALL, random_jpeg
from samestep.data.parquet_files import ParquetFiles
from samestep.data.streams import StreamDataset
from samestep.zoo.image_files import read_image
from samestep.zoo.image_transforms import ImageTransforms
from samestep.zoo.splits import Splits

IMAGES = (
    "data={name: 'helpers.sample_files:load', options: {path: photos, evaluation_path: photos_val, window: 12}}",
    *SMALL,
)
IMAGE_STEPS = 25  # of an epoch


def photos(count: int) -> Iterator[dict[str, Any]]:
    """Yield encoded images of two classes."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        yield {"image": random_jpeg(generator, 48, 64), "label": number % 2}


def write_images(root: Path) -> None:
    """Write 200 training images in 10 files, and 20 validation images."""
    for name, count in (("photos", 200), ("photos_val", 20)):
        (root / name).mkdir()
        rows = pyarrow.Table.from_pylist(list(photos(count)))
        for number in range(count // 20):
            pyarrow.parquet.write_table(rows.slice(20 * number, 20), root / name / f"{number}.parquet")


def load(path: str, evaluation_path: str, window: int, image_size: int) -> Splits:
    """Return the streams of a recipe."""
    transforms = ImageTransforms(image_size)
    return Splits(
        train=StreamDataset(ParquetFiles(path), window=window, transform=partial(sample, transforms.train())),
        evaluation=StreamDataset(ParquetFiles(evaluation_path), transform=partial(sample, transforms.validation())),
        classes=("cat", "dog"),
        reads_files=True,
    )


def sample(transform: Callable[[Any], torch.Tensor], row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the transformed image and the class number of a row."""
    return transform(read_image(BytesIO(row["image"]), "a photo")), row["label"]
