"""Folders of sample files for recipes, and a small model for them."""

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image

from samestep.data.parquet_files import ParquetFiles
from samestep.data.streams import StreamDataset
from samestep.zoo.image_files import read_image
from samestep.zoo.image_transforms import ImageTransforms
from samestep.zoo.splits import Splits

IMAGES = (
    "data={name: 'helpers.sample_files:load', options: {path: photos, evaluation_path: photos_val}}",
    "model.name=helpers.sample_files:SmallNet",
    "batch_size=8",
    "microbatches=4",
    "epochs=2",
    "metrics=[]",
)
IMAGE_STEPS = 25  # of an epoch


class SmallNet(torch.nn.Sequential):
    """A convolution, batch norm and a linear layer."""

    def __init__(self, num_classes: int) -> None:
        layers = (torch.nn.Conv2d(3, 8, 5, stride=3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        super().__init__(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, num_classes))


def photos(count: int) -> Iterator[dict[str, Any]]:
    """Yield JPEG files of random pixels in two classes."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        file = BytesIO()
        Image.fromarray(generator.integers(0, 256, (48, 64, 3), dtype=numpy.uint8)).save(file, "JPEG")
        yield {"image": file.getvalue(), "label": number % 2}


def write_images(root: Path) -> None:
    """Write 200 training images in 10 files, and 20 validation images."""
    for name, count in (("photos", 200), ("photos_val", 20)):
        (root / name).mkdir()
        rows = pyarrow.Table.from_pylist(list(photos(count)))
        for number in range(count // 20):
            pyarrow.parquet.write_table(rows.slice(20 * number, 20), root / name / f"{number}.parquet")


def load(path: str, evaluation_path: str) -> Splits:
    """Return the streams of a recipe."""
    transforms = ImageTransforms(image_size=32)
    train = StreamDataset(ParquetFiles(path), window=12, transform=partial(sample, transforms.train()))
    evaluation = StreamDataset(ParquetFiles(evaluation_path), transform=partial(sample, transforms.validation()))
    return Splits(train=train, evaluation=evaluation, classes=("cat", "dog"), reads_files=True)


def sample(transform: Callable[[Any], torch.Tensor], row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return the transformed image and the class number of a row."""
    return transform(read_image(BytesIO(row["image"]), "a photo")), row["label"]
