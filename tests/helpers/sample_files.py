"""Folders of sample files for recipes, and small models for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

from helpers.photos import SMALL, random_jpeg

IMAGES = (
    "data={name: stream_images, options: {path: photos, evaluation_path: photos_val, classes: [cat, dog], window: 12}}",
    *SMALL,
)
IMAGE_STEPS = 25  # of an epoch


def photos(count: int) -> Iterator[dict[str, Any]]:
    """Yield encoded images of two classes; some labels are names, the others numbers."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        yield {"image": random_jpeg(generator, 48, 64), "label": ("cat", "1")[number % 2]}


def write_images(root: Path) -> None:
    """Write 200 training images in 10 files, and 20 validation images."""
    for name, count in (("photos", 200), ("photos_val", 20)):
        (root / name).mkdir()
        rows = pyarrow.Table.from_pylist(list(photos(count)))
        for number in range(count // 20):
            pyarrow.parquet.write_table(rows.slice(20 * number, 20), root / name / f"{number}.parquet")
