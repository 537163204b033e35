"""Generate data for segmentation: images of bright discs on noise, and their masks.

python examples/draw_masks.py discs
"""

import argparse
from pathlib import Path

import numpy
from PIL import Image


def disc(shape: tuple[int, int], centre: list[float], radius: float) -> numpy.ndarray:
    """Return ones within a radius of a point, zeros elsewhere."""
    distance = sum(
        (axis - middle) ** 2 for axis, middle in zip(numpy.indices(shape), centre, strict=True)
    )
    return (distance <= radius**2).astype(numpy.uint8)


def draw(folder: Path, count: int) -> None:
    """Write `count` pairs: `images/000.jpg` and `masks/000.png`."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    random = numpy.random.default_rng(0)
    for number in range(count):
        shape = tuple(int(side) for side in random.integers(60, 90, 2))
        radius = random.uniform(4, 9)
        mask = disc(shape, [random.uniform(radius, side - radius) for side in shape], radius)
        values = random.normal(80, 25, shape) + 70 * mask
        Image.fromarray(values.clip(0, 255).astype(numpy.uint8)).convert("RGB").save(
            folder / f"images/{number:03}.jpg"
        )
        Image.fromarray(mask * 255).save(folder / f"masks/{number:03}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Generate images and masks for segmentation.")
    parser.add_argument("images", type=Path, help="folder for images and their masks")
    draw(parser.parse_args().images, 60)
