"""Draw images of limes, lemons and oranges, one folder per class: `python examples/fruit.py pictures`."""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, IMAGES_PER_CLASS = 96, 40
COLORS = {"lemon": (235, 215, 60), "lime": (90, 160, 50), "orange": (230, 120, 30)}


def draw_fruit(kind: str, generator: random.Random) -> Image.Image:
    """Return one fruit at a random position, with random brightness."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(generator.randrange(90, 200) for _ in range(3)))
    radius = generator.randrange(20, 36)
    x, y = (generator.randrange(radius, SIZE - radius) for _ in range(2))
    color = tuple(max(0, min(255, value + generator.randrange(-30, 30))) for value in COLORS[kind])
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return image


def main() -> None:
    folder, generator = Path(sys.argv[1]), random.Random(0)
    for kind in COLORS:
        (folder / kind).mkdir(parents=True)
        for number in range(IMAGES_PER_CLASS):
            draw_fruit(kind, generator).save(folder / kind / f"{number:03}.jpg")


if __name__ == "__main__":
    main()
