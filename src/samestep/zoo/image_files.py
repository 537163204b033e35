"""Reading of image files, with errors that name damaged files.

Decisions: docs/decisions/images.md
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
from PIL import Image, ImageOps

from samestep.errors import RunError, SamestepError
from samestep.zoo.options import unusable

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif"),
    *(".tif", ".tiff", ".jfif", ".ppm", ".pgm"),
)
# Formats by content: Pillow starts another program for some others, whatever the name of the file.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")
_BITS_PER_SAMPLE = 258  # TIFF tag
# Errors of the operating system with these numbers concern the file; all others concern the
# machine.
_FILE_ERRNOS = (
    None,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
# Longer images are cropped to this aspect ratio before their shorter side is resized.
_MAX_ASPECT_RATIO = 4


def read_image(path: Path) -> Image.Image:
    """Return the first image of a file as RGB.

    Raises:
        DataError: the file is missing, damaged or no image, or has more than 16 bits per channel.
        RunError: the disk or the network failed.
    """
    with file_errors(path, "an image"), open_image(path) as image:
        return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    # Pillow scales a 16-bit PGM to the full range, but other images with this mode have 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        # Pillow opens 12 bits as 16 bits.
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]
        values = numpy.asarray(image).astype(numpy.float64)
        gray = numpy.rint(values * (255 / (2**bits - 1))).clip(0, 255).astype(numpy.uint8)
        return Image.fromarray(gray).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32-bit values have no defined white")
    if image.has_transparency_data:
        # The colour of transparent pixels, mostly black, is not visible; viewers show the
        # background.
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Yield the first image of a file, in the orientation of its camera.

    Invalid files raise exceptions of any type.
    """
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        image = Image.open(path, formats=_FORMATS)
    with image:
        # Cameras store the orientation separately from the pixels.
        ImageOps.exif_transpose(image, in_place=True)
        yield image


@contextmanager
def file_errors(name: str | Path, kind: str) -> Iterator[None]:
    """Convert exceptions of a decoder to errors that name the file.

    Args:
        name: name of the file.
        kind: its expected content, such as `a mask`.

    Raises:
        DataError: the file is missing, damaged or of another kind.
        RunError: the disk or the network failed, which does not make the sample unusable.
    """
    try:
        yield
    except (MemoryError, SamestepError):
        raise
    except Exception as error:  # decoders raise exceptions of many types for damaged files
        if getattr(error, "errno", None) not in _FILE_ERRNOS:
            raise RunError(
                f"{name} cannot be read now: {getattr(error, 'strerror', error)}",
                expected="a working disk and network",
                fix="resume the run when the disk or the network works again",
                code="E_IO",
            ) from error
        problem = f"{name} cannot be read as {kind}: {error}"
        expected = "intact files of a supported format (images: 8 or 16 bits per channel)"
        raise unusable(problem, expected, "replace the file and resume", "E_UNREADABLE") from error


def crop_long_image(image: Image.Image) -> Image.Image:
    """Return the center of a very long image, or another image unchanged.

    Resizing an image of one pixel in width would need gigabytes.
    """
    longest = _MAX_ASPECT_RATIO * min(image.size)
    width = min(image.width, longest)
    height = min(image.height, longest)
    if (width, height) == image.size:
        return image
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
