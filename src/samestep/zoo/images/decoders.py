"""Decoders of image files, and the scale at which a JPEG file is decoded for a crop.

Decisions: docs/decisions/images.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from samestep.zoo.images.files import file_errors, open_header, read_image
from samestep.zoo.options import import_optional

Decoder = Literal["pillow", "simplejpeg"]
ReadImage = Callable[
    [Path | BytesIO, str], Any
]  # from a file and its name in errors to an image for a transform
Box = tuple[int, int, int, int]  # top, left, height, width
SCALES = (
    8,
    4,
    2,
)  # divisors of height and width for which libjpeg-turbo has a fast reduced transform


class LazyImage(Protocol):
    """Image with pixels that are read at a scale which depends on their use.

    Attributes:
        height: pixels of the upright image.
        width: pixels of the upright image.
    """

    height: int
    width: int

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return RGB bytes `(3, H, W)`; height and width can be divided by `scale`."""


DecodedImage = Image.Image | LazyImage


class StoredImage:
    """Pixels `(3, height, width)` at one scale, such as those of a cache."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self._pixels = pixels
        _, self.height, self.width = pixels.shape

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return all pixels, at any scale."""
        return self._pixels


def as_image(image: DecodedImage) -> Image.Image:
    """Return an image of Pillow."""
    if isinstance(image, Image.Image):
        return image
    return Image.fromarray(image.pixels().permute(1, 2, 0).numpy())


def as_pixels(image: DecodedImage) -> torch.Tensor:
    """Return the bytes `(3, H, W)` of an image."""
    if isinstance(image, Image.Image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    return image.pixels()


def cropped_pixels(image: LazyImage, box: Box, height: int, width: int) -> torch.Tensor:
    """Return the pixels of a box at the smallest scale with at least `height` x `width` pixels, else at full scale."""
    scale = next((n for n in SCALES if box[2] >= n * height and box[3] >= n * width), 1)
    pixels = image.pixels(scale)
    rows = _scaled(box[0], box[2], image.height, pixels.shape[1])
    columns = _scaled(box[1], box[3], image.width, pixels.shape[2])
    return pixels[:, rows, columns]


def _scaled(start: int, length: int, full: int, decoded: int) -> slice:
    """Return the pixels `start` to `start + length` of `full` ones in an image of `decoded` ones."""
    return slice(round(start * decoded / full), max(1, round((start + length) * decoded / full)))


# EXIF orientation: whether height and width are exchanged, and which axes are flipped afterwards.
_UPRIGHT: dict[int, tuple[bool, tuple[int, ...]]] = {
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}


def image_reader(decoder: Decoder) -> ReadImage:
    """Return the function that reads images: as RGB images of Pillow, or as `EncodedImage`.

    Raises:
        RecipeError: the library of the decoder is not installed.
    """
    if decoder == "pillow":
        return read_image
    library = import_optional(decoder, f"data.options.decoder {decoder}", extra="recipes")
    return partial(EncodedImage, library.decode_jpeg)


class EncodedImage:
    """An image file in memory of which only the header is decoded, so that a crop can select the scale of its pixels.

    RGB files of JPEG are decoded by simplejpeg. All other files, and damaged ones, are decoded by
    Pillow, with its tolerance and its errors.

    Attributes:
        height: pixels of the upright image.
        width: pixels of the upright image.

    Raises:
        DataError: the file is missing, damaged or no image; here, or when its pixels are decoded.
        RunError: the disk or the network failed.
    """

    def __init__(self, decode_jpeg: Callable[..., Any], source: Path | BytesIO, name: str) -> None:
        self._decode_jpeg = decode_jpeg
        self._source = source
        self._name = name
        self._image: Image.Image | None = None
        with file_errors(name, "an image"):
            self._data = source.read_bytes() if isinstance(source, Path) else source.getvalue()
            if self._reads_header():
                is_transposed = _UPRIGHT.get(self._orientation, (False,))[0]
                self.width, self.height = self._size[::-1] if is_transposed else self._size
            else:
                self._image = read_image(source, name)
                self.width, self.height = self._image.size

    def _reads_header(self) -> bool:
        """Read the header, and return whether simplejpeg supports the file."""
        try:
            with open_header(BytesIO(self._data)) as header:
                is_supported = header.format in ("JPEG", "MPO") and header.mode == "RGB"
                if is_supported:
                    self._size = header.size
                    self._orientation = header.getexif().get(ExifTags.Base.Orientation, 1)
                return is_supported
        except UnidentifiedImageError:  # raised by `read_image` with the name of the file
            return False

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return the upright RGB image `(3, height, width)` as unsigned bytes, with the channels last in memory.

        Args:
            scale: 1 or one of `SCALES`; height and width of a JPEG file are divided by it and
                rounded up. Other files have their full size.
        """
        if self._image is None:
            width, height = (-(-length // scale) for length in self._size)
            try:
                array = self._decode_jpeg(
                    self._data, "RGB", min_height=height, min_width=width, min_factor=scale
                )
                return _upright(torch.from_numpy(array).permute(2, 0, 1), self._orientation)
            except ValueError:  # Pillow reads some damaged files, and has the errors of the others
                self._image = read_image(self._source, self._name)
        return as_pixels(self._image)


def _upright(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return `(3, height, width)` in the orientation of the camera; an unknown number is ignored, as by Pillow."""
    is_transposed, flipped = _UPRIGHT.get(orientation, (False, ()))
    pixels = pixels.transpose(1, 2) if is_transposed else pixels
    if flipped:
        return pixels.flip(flipped)
    return pixels
