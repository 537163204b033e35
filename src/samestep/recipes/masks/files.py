"""Masks as image files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image, ImageOps

from samestep.recipes.masks.code import MaskCode, Numbers
from samestep.recipes.reading import reading

_WHOLE_NUMBERS = ("1", "L", "P", "I")


def read_mask(path: Path, code: MaskCode) -> Numbers:
    """Class numbers `(H, W)` of a mask in an image file.

    In an image with a palette a value is the number of the entry, unless the values of `code` are colours.

    Raises:
        DataError: it is not there, is no image, is cut off, or has values that mean nothing.
        RunError: the disk or the network failed.
    """
    with reading(path, "a mask"), Image.open(path) as image:
        # As the image that it belongs to is shown.
        ImageOps.exif_transpose(image, in_place=True)
        values = numpy.asarray(image.convert("RGB")) if code.has_colours else _whole_numbers(image)
    return code.numbers(values, str(path))


def _whole_numbers(image: Image.Image) -> NDArray[Any]:
    if image.mode in _WHOLE_NUMBERS or image.mode.startswith("I;16"):
        return numpy.asarray(image).astype(numpy.int64)
    if image.mode in ("LA", "PA"):
        return numpy.asarray(image)[..., 0]
    if image.mode in ("RGB", "RGBA"):
        values = numpy.asarray(image)[..., :3]
        if (values == values[..., :1]).all():
            return values[..., 0]
        raise ValueError("it has colours, so data.options.mask_values are colours: [[0, 0, 0], [255, 0, 0]]")
    raise ValueError(f"its values are of the kind {image.mode}; those of a mask are whole numbers or RGB")
