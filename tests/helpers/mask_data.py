"""Images, volumes and their masks, made for tests: bright discs and balls on noise."""

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from helpers.system import events


def draw_images(root: Path, count: int, *, classes: int = 1) -> Path:
    """`images/NNN.jpg` and `masks/NNN.png` of many sizes; values are 0 and 255, or class numbers."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    random = numpy.random.default_rng(0)
    for number in range(count):
        width, height = 40 + number % 7 * 3, 36 + number % 5 * 4
        mask = Image.new("L", (width, height))
        draw = ImageDraw.Draw(mask)
        for value in range(1, classes + 1):
            left, top, side = (int(part) for part in random.integers((1, 1, 8), (width - 15, height - 15, 14)))
            draw.ellipse((left, top, left + side, top + side), fill=255 if classes == 1 else value)
        pixels = random.integers(0, 90, (height, width, 3)).astype(numpy.uint8)
        pixels[numpy.asarray(mask) > 0] += numpy.uint8(120)
        Image.fromarray(pixels).save(root / "images" / f"{number:03}.jpg")
        mask.save(root / "masks" / f"{number:03}.png")
    return root


def ball(shape: tuple[int, int, int], centre: tuple[float, float, float], radius: float) -> NDArray[numpy.uint8]:
    """Ones within a radius, zeros elsewhere."""
    places = numpy.indices(shape).astype(float)
    away = sum((axis - middle) ** 2 for axis, middle in zip(places, centre, strict=True))
    return (numpy.asarray(away) <= radius**2).astype(numpy.uint8)


def make_volumes(root: Path, count: int) -> Path:
    """`images/NNN.npy` and `masks/NNN.npy` of many shapes, with a bright ball in each."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    random = numpy.random.default_rng(1)
    for number in range(count):
        shape = (9 + number % 3, 12 + number % 4, 11 + number % 5)
        z, y, x = (float(part) for part in random.uniform(3, 7, 3))
        mask = ball(shape, (z, y, x), 2.5)
        values = (random.normal(100, 20, shape) + 60 * mask).astype(numpy.float32)
        numpy.save(root / "images" / f"{number:03}.npy", values)
        numpy.save(root / "masks" / f"{number:03}.npy", mask)
    return root


def logged(run: Path) -> list[dict[str, Any]]:
    """Return the notes, evaluations and skipped samples of a run."""
    ignored = ("time", "samples_per_second")
    results = [*events(run, "note"), *events(run, "evaluation"), *events(run, "skipped")]
    return [{key: value for key, value in event.items() if key not in ignored} for event in results]
