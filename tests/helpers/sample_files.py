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
TOKENS = (
    "data.name=stream_tokens",
    "data.options={block_size: 16, window: 20, path: tokens, evaluation_path: tokens_val}",
    "model.options={n_embd: 8, n_head: 2, n_layer: 1, dropout: 0.1}",
    "epochs=2",
)
TOKEN_STEPS = 25  # of an epoch


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


def write_tokens(root: Path) -> None:
    """Write tokens of bytes: five files of 60 samples, and one."""
    generator = numpy.random.default_rng(0)
    for name, count in (("tokens", 5), ("tokens_val", 1)):
        (root / name).mkdir()
        for number in range(count):
            generator.integers(0, 257, 961, dtype=numpy.uint16).tofile(root / name / f"{number}.bin")
