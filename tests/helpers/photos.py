"""A small folder of photographs, and a small model."""

from io import BytesIO
from pathlib import Path

import numpy
import torch
from PIL import Image

SMALL = (
    "data.options.image_size=32",
    "model.name=helpers.photos:SmallNet",
    "batch_size=8",
    "microbatches=4",
    "epochs=2",
    "metrics=[]",
)
FOLDERS = ("data.options.path=photos", "data.options.evaluation_path=photos_val", *SMALL)
FOLDER_STEPS = 25  # of an epoch


class SmallNet(torch.nn.Sequential):
    """A convolution, batch norm and a linear layer."""

    def __init__(self, num_classes: int) -> None:
        layers = (torch.nn.Conv2d(3, 8, 5, stride=3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        super().__init__(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, num_classes))


def write_photos(root: Path, count: int = 24) -> None:
    """Write JPEG files of two classes."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        folder = root / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(random_jpeg(generator, 60, 80))


def write_folders(root: Path) -> None:
    """Write the training and validation images of `FOLDERS`."""
    write_photos(root / "photos", 8 * FOLDER_STEPS)
    write_photos(root / "photos_val", 20)


def random_jpeg(generator: numpy.random.Generator, height: int, width: int) -> bytes:
    """Return a file of random pixels."""
    file = BytesIO()
    Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=numpy.uint8)).save(file, "JPEG")
    return file.getvalue()
