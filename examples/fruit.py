"""Draws pictures of limes, lemons and oranges, one folder a class: python examples/fruit.py pictures"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, EACH = 96, 40
COLOURS = {"lemon": (235, 215, 60), "lime": (90, 160, 50), "orange": (230, 120, 30)}


def drawn(kind: str, chance: random.Random) -> Image.Image:
    """One fruit somewhere on a table, a little lighter or darker than others of its kind."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(chance.randrange(90, 200) for _ in range(3)))
    radius = chance.randrange(20, 36)
    x, y = (chance.randrange(radius, SIZE - radius) for _ in range(2))
    colour = tuple(max(0, min(255, value + chance.randrange(-30, 30))) for value in COLOURS[kind])
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image


def main() -> None:
    folder, chance = Path(sys.argv[1]), random.Random(0)
    for kind in COLOURS:
        (folder / kind).mkdir(parents=True)
        for number in range(EACH):
            drawn(kind, chance).save(folder / kind / f"{number:03}.jpg")


if __name__ == "__main__":
    main()
