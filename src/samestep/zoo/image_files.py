"""Reading of image files: errors of damaged files, a fixed resize, and a cache.

Decisions: docs/decisions/images.md
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import PIL
from PIL import Image, ImageOps, features

from samestep.config.recipe import DataConfig
from samestep.distributed.env import cache_folder
from samestep.errors import RunError, SamestepError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import unusable
from samestep.zoo.sample_cache import SampleCache, cache_name, file_key

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
_CHANNELS = 3
# Longer images are cropped to this aspect ratio before their shorter side is resized.
_MAX_ASPECT_RATIO = 4

# From a file and its name in errors to an image for a transform.
ReadImage = Callable[[Path | BytesIO, str], Image.Image]


def read_image(source: Path | BytesIO, name: str = "") -> Image.Image:
    """Return the first image of a file as RGB; `name` is that of the file in errors.

    Raises:
        DataError: the file is missing, damaged or no image, or has more than 16 bits per channel.
        RunError: the disk or the network failed.
    """
    with file_errors(name or str(source), "an image"), open_image(source) as image:
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
def open_image(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Yield the first image of a file, in the orientation of its camera.

    Invalid files raise exceptions of any type.
    """
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        image = Image.open(source, formats=_FORMATS)
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


@cache
def _pillow_resize(shorter_side: int, interpolation: str) -> Any:
    make_torchvision_importable()
    # Here, because digits and texts need this module without torchvision.
    from torchvision.transforms import v2

    return v2.Resize([shorter_side], interpolation=v2.InterpolationMode(interpolation))


class ImageSource:
    """Reader of image files: decodes, resizes, and uses a cache.

    Args:
        shorter_side: length to which the shorter side of every image is resized, or None.
        interpolation: `bilinear` or `bicubic`.
    """

    def __init__(self, shorter_side: int | None = None, interpolation: str = "bilinear") -> None:
        self._shorter_side = shorter_side
        self._interpolation = interpolation
        self._cache: SampleCache | None = None

    def __call__(self, source: Path | BytesIO, name: str) -> Image.Image:
        """Return the image of a file, which has `name` in errors.

        Raises:
            DataError: the file is missing, damaged or no image.
            RunError: the disk or the network failed.
        """
        if self._cache is None or not isinstance(source, Path):
            return self._decoded(source, name)
        with file_errors(name, "an image"):
            status = os.stat(source)
        key = file_key(source, status)
        sample = self._cache.get(key, name)
        if sample is not None:
            return Image.fromarray(sample.data.view(sample.height, sample.width, _CHANNELS).numpy())
        image = self._decoded(source, name)
        array = numpy.array(image)
        self._cache.add(key, array.data.cast("B"), *array.shape[:2])
        return image

    def _decoded(self, source: Path | BytesIO, name: str) -> Image.Image:
        """Return a decoded image after the fixed resize."""
        image = read_image(source, name)
        if self._shorter_side is None:
            return image
        resize = _pillow_resize(self._shorter_side, self._interpolation)
        resized: Image.Image = resize(crop_long_image(image))
        return resized

    def use_cache(self, cache: SampleCache) -> None:
        """Read the pixels of files from a cache, and write missing images to the cache."""
        self._cache = cache

    def description(self) -> dict[str, object]:
        """Return the facts on which the bytes of a cache depend."""
        names = ("libjpeg_turbo", "jpg", "zlib", "webp", "libtiff")
        libraries = {"pillow": PIL.__version__, **{name: features.version(name) for name in names}}
        size = None if self._shorter_side is None else f"{self._shorter_side} {self._interpolation}"
        return {
            "kind": "decoded",
            "libraries": libraries,
            "shorter_side": size,
        }


def open_cache(source: ImageSource, files: Sequence[Path], config: DataConfig) -> SampleCache:
    """Let `source` use the cache of a recipe, and return the cache.

    Args:
        source: source of the images.
        files: files of the training and validation images.
        config: the key `cache_gb`.
    """
    root = Path()
    if files:
        root = Path(os.path.commonpath([os.path.abspath(file.parent) for file in files]))
    facts = source.description()
    limit = None if config.cache_gb is None else int(config.cache_gb * 1e9)
    folder = cache_folder() / cache_name(root, facts)
    cache = SampleCache(folder, {"source": str(root), **facts}, limit=limit, samples=len(files))
    source.use_cache(cache)
    return cache
