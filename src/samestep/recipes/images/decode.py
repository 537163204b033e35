"""An image file as 8-bit RGB, as a viewer shows it."""

from __future__ import annotations

import errno
from io import BytesIO
from pathlib import Path

import numpy
from PIL import Image, ImageOps

from samestep.errors import DataError, RunError

# What these say is about the file; other errors of the system are about the machine.
_OF_THE_FILE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)
_SIXTEEN_BITS = 65_535
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def read_image(path: Path) -> Image.Image:
    """The first picture of a file.

    Raises:
        DataError: it is not there, is no image, is cut off, or its values have no agreed brightness.
        RunError: the disk or the network failed, which says nothing about the image.
    """
    return decode(path, str(path))


def decode(source: Path | BytesIO, name: str) -> Image.Image:
    """The first picture of `source`; `name` is what errors call it. See `read_image`."""
    try:
        with Image.open(source) as image:
            # The orientation that a camera wrote down, which the pixels themselves do not follow.
            ImageOps.exif_transpose(image, in_place=True)
            return _as_rgb(image)
    except MemoryError:
        raise
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise RunError(
                f"{name} cannot be read now: {error.strerror}",
                rule="what the disk or the network does wrong makes no image a bad one",
                do="resume when it is back",
            ) from error
        raise _unreadable(name, error) from error
    except Exception as error:  # decoders of damaged files raise of many kinds, each of them means this
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(
        f"{name} cannot be read as an image: {error}",
        rule="every file of the data is a whole image of 8 or 16 bits",
        do="remove or replace the file, then resume; or leave such files out: data.bad_samples: skip",
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _gray(image, _largest(image))
    if image.mode == "I":  # 16 bits in a PGM, which Pillow brings to the whole range; 32 bits elsewhere
        if image.format != "PPM":
            raise ValueError("it has 32 bits a value, and nothing says which of them is white")
        return _gray(image, _SIXTEEN_BITS)
    if image.mode == "F":
        values = numpy.asarray(image)
        if not (numpy.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError("it has floating-point values that are not all between 0 and 1")
        return _gray(image, 1)
    if image.has_transparency_data:
        # Whatever colour stands behind full transparency, mostly black, is not part of what anybody sees.
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image.convert("RGB")


def _gray(image: Image.Image, white: int) -> Image.Image:
    """Values of more than 8 bits, rounded to 8; Pillow's own conversion would cut off what is above 255."""
    values = numpy.asarray(image).astype(numpy.float64)
    gray = numpy.rint(values * (255 / white)).clip(0, 255).astype(numpy.uint8)
    return Image.fromarray(gray).convert("RGB")


def _largest(image: Image.Image) -> int:
    """The value of white: TIFFs of 12 bits are opened as if they had 16."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS_PER_SAMPLE, (16,))[0]
    return int(2**bits - 1)
