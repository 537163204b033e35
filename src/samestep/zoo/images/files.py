"""Reading of image files as RGB with 8 bits per channel, and errors of damaged files."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy
from PIL import Image, ImageOps

from samestep.errors import DataError, RunError, SamestepError

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".webp",
    ".gif",
    ".tif",
    ".tiff",
    ".jfif",
    ".ppm",
    ".pgm",
)
_BITS_PER_SAMPLE = 258  # TIFF tag
# Formats by content: Pillow starts another program for some others, whatever the name of the file.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")

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


def read_image(source: Path | BytesIO, name: str = "") -> Image.Image:
    """Return the first image of a file as RGB; `name` is that of the file in errors, by default its path.

    Raises:
        DataError: the file is missing, damaged or no image, or has more than 16 bits per channel.
        RunError: the disk or the network failed.
    """
    with file_errors(name or str(source), "an image"), open_image(source) as image:
        return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    # Pillow scales a 16-bit PGM to the full range, but other images with this mode have 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[
            0
        ]  # Pillow opens 12 bits as 16 bits
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
def open_image(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Yield the first image of a file, in the orientation of its camera; invalid files raise exceptions of any type."""
    with open_header(source) as image:
        # Cameras store the orientation separately from the pixels.
        ImageOps.exif_transpose(image, in_place=True)
        yield image


@contextmanager
def open_header(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Yield the first image of a file before its pixels are decoded, in the orientation of the file."""
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        image = Image.open(source, formats=_FORMATS)
    with image:
        yield image


@contextmanager
def file_errors(name: str | Path, kind: str) -> Iterator[None]:
    """Convert exceptions of a decoder to errors that name the file; `kind` is its expected content, such as `a mask`.

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
        raise DataError(
            f"{name} cannot be read as {kind}: {error}",
            expected="intact files of a supported format (images: 8 or 16 bits per channel)",
            fix="replace the file and resume, or skip such samples: data.bad_samples: skip",
            code="E_UNREADABLE",
        ) from error
