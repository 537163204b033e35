"""Conversion of images of all modes to RGB with 8 bits per channel."""

from __future__ import annotations

import numpy
from PIL import Image

_MAX_16_BIT = 65_535
_BITS_PER_SAMPLE = 258  # TIFF tag


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel.

    Raises:
        ValueError: the brightness of its values is undefined.
    """
    if image.mode.startswith("I;16"):
        return _scaled_to_8_bits(image, _white(image))
    if image.mode == "I":  # Pillow scales a 16-bit PGM to the full range; other formats have 32 bits
        if image.format != "PPM":
            raise ValueError("32-bit values have no defined white")
        return _scaled_to_8_bits(image, _MAX_16_BIT)
    if image.mode == "F":
        values = numpy.asarray(image)
        if not (numpy.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError("floating-point values are not all between 0 and 1")
        return _scaled_to_8_bits(image, 1)
    if image.has_transparency_data:
        # The colour of transparent pixels, mostly black, is not visible; viewers show the background.
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _scaled_to_8_bits(image: Image.Image, white: int) -> Image.Image:
    """Return rounded 8-bit values; Pillow's conversion would clip values above 255."""
    values = numpy.asarray(image).astype(numpy.float64)
    gray = numpy.rint(values * (255 / white)).clip(0, 255).astype(numpy.uint8)
    return Image.fromarray(gray).convert("RGB")


def _white(image: Image.Image) -> int:
    """Return the value of white; Pillow opens a TIFF of 12 bits as one of 16 bits."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
    return int(2**bits - 1)
