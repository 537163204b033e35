"""Reading of image files, and errors of damaged files."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from samestep.errors import DataError, RunError, SamestepError
from samestep.zoo.images.rgb_conversion import to_rgb

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".jfif", ".ppm", ".pgm")
# Formats by content: Pillow starts another program for some others, whatever the name of the file.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM")

# Errors of the operating system with these numbers concern the file; all others concern the machine.
_FILE_ERRNOS = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


def read_image(path: Path) -> Image.Image:
    """Return the first image of a file as RGB.

    Raises:
        DataError: the file is missing, damaged or no image, or the brightness of its values is undefined.
        RunError: the disk or the network failed.
    """
    return decode(path, str(path))


def decode(source: Path | BytesIO, name: str) -> Image.Image:
    """Return the first image of `source`, called `name` in errors; see `read_image`."""
    with file_errors(name, "an image"), open_image(source) as image:
        return to_rgb(image)


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
            fix="replace the file; then resume a training; or remove the file and resume with --accept-changes; or "
            "skip such samples: data.bad_samples: skip",
            code="E_UNREADABLE",
        ) from error
