"""Image files of every kind that people have, good and bad, made on the spot."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

RED = (200, 30, 40)


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The bytes of a file."""
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def plain(size: tuple[int, int] = (40, 20)) -> Image.Image:
    """Return an image of one colour, so that every pixel has a known value."""
    return Image.new("RGB", size, RED)


def noise(size: int = 40) -> Image.Image:
    """Return an image that no format compresses, so that truncation removes pixels."""
    return Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=numpy.uint8))


def gray(values: Any, kind: type) -> Image.Image:
    """One channel of numbers of another type than 8 bits."""
    return Image.fromarray(numpy.asarray(values, dtype=kind).reshape(8, -1))


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # as it is held upright, turned by 90 degrees
    return encoded(plain(), "JPEG", exif=exif, quality=100)


def animated() -> bytes:
    return encoded(plain(), "GIF", save_all=True, append_images=[Image.new("RGB", (40, 20), (0, 0, 255))])


def see_through() -> Image.Image:
    """Nothing is to be seen, though black stands behind it."""
    return Image.new("RGBA", (40, 20), (0, 0, 0, 0))


def cut(data: bytes) -> bytes:
    return data[: 2 * len(data) // 3]


HALF = 32_896  # 128 of 255, in 16 bits
MIDDLE = (128, 128, 128)

# Ending, file, and the colour that is to be seen.
READ: dict[str, tuple[str, Callable[[], bytes], tuple[int, int, int]]] = {
    "cmyk": ("jpg", lambda: encoded(Image.new("CMYK", (40, 20), (55, 225, 215, 0)), "JPEG", quality=100), RED),
    "gray-16-png": ("png", lambda: encoded(gray([HALF] * 64, numpy.uint16), "PNG"), MIDDLE),
    "gray-16-tiff": ("tiff", lambda: encoded(gray([HALF] * 64, numpy.uint16), "TIFF"), MIDDLE),
    "gray-8": ("png", lambda: encoded(Image.new("L", (8, 8), 128), "PNG"), MIDDLE),
    "one-bit": ("png", lambda: encoded(Image.new("1", (8, 8), 1), "PNG"), (255, 255, 255)),
    "palette": ("gif", lambda: encoded(plain().quantize(4), "GIF"), RED),
    "palette-see-through": (
        "png",
        lambda: encoded(plain().quantize(4), "PNG", transparency=bytes(256)),
        (255, 255, 255),
    ),
    "alpha": ("png", lambda: encoded(see_through(), "PNG"), (255, 255, 255)),
    "half-alpha": ("png", lambda: encoded(Image.new("LA", (8, 8), (0, 127)), "PNG"), MIDDLE),
    "colour-key": ("png", lambda: encoded(plain(), "PNG", transparency=RED), (255, 255, 255)),
    "rotated": ("jpg", rotated, RED),
    "animated": ("gif", animated, RED),
    "one-pixel": ("png", lambda: encoded(plain((1, 1)), "PNG"), RED),
    "one-line": ("png", lambda: encoded(plain((1, 60_000)), "PNG"), RED),
    "webp": ("webp", lambda: encoded(plain(), "WEBP", lossless=True), RED),
    "bmp": ("bmp", lambda: encoded(plain(), "BMP"), RED),
}

# Suffix, content and error message.
REFUSED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "cut-jpeg": ("jpg", lambda: cut(encoded(noise(), "JPEG")), "truncated"),
    "cut-png": ("png", lambda: cut(encoded(noise(), "PNG")), "truncated"),
    "empty": ("jpg", bytes, "cannot identify"),
    "text": ("jpg", lambda: b"<html>404 Not Found</html>", "cannot identify"),
    "float": ("tif", lambda: encoded(gray([0.5] * 64, numpy.float32), "TIFF"), "32-bit values"),
    "gray-32": ("tif", lambda: encoded(gray(range(64), numpy.int32), "TIFF"), "32-bit values"),
}


def write(folder: Path, name: str) -> Path:
    """Write the file of a kind of either table."""
    ending, make, _ = READ[name] if name in READ else REFUSED[name]
    path = folder / f"{name}.{ending}"
    path.write_bytes(make())
    return path
