"""Images and their masks, made for tests: bright discs on noise."""

from pathlib import Path
from typing import Any

import numpy
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


def logged(run: Path) -> list[dict[str, Any]]:
    """Return the notes, evaluations and skipped samples of a run."""
    ignored = ("time", "samples_per_second")
    results = [*events(run, "note"), *events(run, "evaluation"), *events(run, "skipped")]
    return [{key: value for key, value in event.items() if key not in ignored} for event in results]
