"""Images of files, prepared by a fixed resize and read from a cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import PIL
import torch
from PIL import Image, features
from torch.nn.functional import interpolate

from samestep.config.recipe import DataConfig
from samestep.distributed.env import cache_folder
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.images.decoders import (
    Box,
    DecodedImage,
    Decoder,
    LazyImage,
    ReadImage,
    StoredImage,
    as_pixels,
    cropped_pixels,
    image_reader,
)
from samestep.zoo.images.files import file_errors
from samestep.zoo.sample_cache import CachedSample, Key, SampleCache, cache_name, file_key

make_torchvision_importable()

from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

_CHANNELS = 3
# Longer images are cropped to this aspect ratio before their shorter side is resized.
_MAX_ASPECT_RATIO = 4


class ImageSource:
    """Reader of image files: decodes, resizes, and uses a cache.

    Args:
        decoder: decoder of the files.
        shorter_side: length to which the shorter side of every image is resized, or None.
        interpolation: `bilinear` or `bicubic`.

    Raises:
        RecipeError: the library of the decoder is not installed.
    """

    def __init__(
        self,
        decoder: Decoder = "pillow",
        shorter_side: int | None = None,
        interpolation: str = "bilinear",
    ) -> None:
        self._decoder = decoder
        self._shorter_side = shorter_side
        self._interpolation = interpolation
        self._decode = image_reader(decoder)
        self._cache: SampleCache | None = None

    def __call__(self, source: Path | BytesIO, name: str) -> DecodedImage:
        """Return the image of a file, which has `name` in errors.

        Raises:
            DataError: the file is missing, damaged or no image; a `LazyImage` can raise this error
            later.
            RunError: the disk or the network failed.
        """
        if self._cache is None or not isinstance(source, Path):
            return self.prepared(self._decode(source, name))
        with file_errors(name, "an image"):
            status = os.stat(source)
        if self._decoder != "pillow" and self._shorter_side is None:
            return _CachedScales(self._cache, self._decode, source, status, name)
        key = file_key(source, status)
        sample = self._cache.get(key, name)
        if sample is not None:
            return StoredImage(_tensor(sample))
        image = self.prepared(self._decode(source, name))
        _add_pixels(self._cache, key, as_pixels(image))
        return image

    def use_cache(self, cache: SampleCache) -> None:
        """Read the pixels of files from a cache, and write missing images to the cache."""
        self._cache = cache

    def description(self) -> dict[str, object]:
        """Return the facts on which the bytes of a cache depend."""
        names = ("libjpeg_turbo", "jpg", "zlib", "webp", "libtiff")
        libraries = {"pillow": PIL.__version__, **{name: features.version(name) for name in names}}
        size = None if self._shorter_side is None else f"{self._shorter_side} {self._interpolation}"
        if self._decoder != "pillow":
            libraries[self._decoder] = version(self._decoder)
            if size is not None:  # torch resizes, with instructions of the processor
                libraries["torch"] = (
                    f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
                )
        return {
            "kind": "decoded",
            "decoder": self._decoder,
            "libraries": libraries,
            "shorter_side": size,
        }

    def prepared(self, image: DecodedImage) -> DecodedImage:
        """Return a decoded image after the fixed resize."""
        if self._shorter_side is None:
            return image
        mode = v2.InterpolationMode(self._interpolation)
        if not isinstance(image, Image.Image):
            return StoredImage(resize_shorter_side(image, self._shorter_side, mode))
        resized: Image.Image = functional.resize(
            crop_long_image(image), [self._shorter_side], interpolation=mode
        )
        return resized


class _CachedScales:
    """Image of a decoder with several scales: its size, and the pixels of each scale that was used, are entries."""

    def __init__(
        self, cache: SampleCache, decode: ReadImage, path: Path, status: os.stat_result, name: str
    ) -> None:
        self._cache = cache
        self._decode = decode
        self._file = (path, status)
        self._name = name
        self._image: LazyImage | None = None
        key = file_key(path, status, variant=0)
        size = cache.get(key, name)
        if size is None:
            self._image = decode(path, name)
            self.height = self._image.height
            self.width = self._image.width
            cache.add(key, memoryview(b"\0"), self.height, self.width)
        else:
            self.height = size.height
            self.width = size.width

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return the pixels of a scale, as the decoder does."""
        path, status = self._file
        key = file_key(path, status, variant=scale)
        sample = self._cache.get(key, self._name)
        if sample is not None:
            return _tensor(sample)
        self._image = self._image or self._decode(path, self._name)
        pixels = self._image.pixels(scale)
        _add_pixels(self._cache, key, pixels)
        return pixels


def _tensor(sample: CachedSample) -> torch.Tensor:
    pixels = torch.frombuffer(sample.data, dtype=torch.uint8)
    return pixels.view(sample.height, sample.width, _CHANNELS).permute(2, 0, 1)


def _add_pixels(cache: SampleCache, key: Key, pixels: torch.Tensor) -> None:
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    cache.add(key, array.data.cast("B"), *array.shape[:2])


def limit_aspect_ratio(height: int, width: int) -> Box:
    """Return the center of a very long image; resizing an image of one pixel in width would need gigabytes."""
    longest = _MAX_ASPECT_RATIO * min(height, width)
    return (
        max(0, height - longest) // 2,
        max(0, width - longest) // 2,
        min(height, longest),
        min(width, longest),
    )


def crop_long_image(image: Image.Image) -> Image.Image:
    """Return the center of a very long image of Pillow, or another image unchanged."""
    top, left, height, width = limit_aspect_ratio(image.height, image.width)
    is_whole = (height, width) == (image.height, image.width)
    if is_whole:
        return image
    return image.crop((left, top, left + width, top + height))


def resize_shorter_side(
    image: LazyImage, length: int, interpolation: v2.InterpolationMode
) -> torch.Tensor:
    """Return the bytes `(3, H, W)` of an image with a shorter side of `length` pixels; very long ones are cropped."""
    box = limit_aspect_ratio(image.height, image.width)
    pixels = cropped_pixels(image, box, length, length)
    height, width = (max(length, length * side // min(box[2:])) for side in box[2:])
    return resize_pixels(pixels, height, width, interpolation)


def resize_pixels(
    pixels: torch.Tensor, height: int, width: int, interpolation: v2.InterpolationMode
) -> torch.Tensor:
    """Return the pixels `(3, height, width)`; torch resizes bytes fastest with the channels last in memory."""
    channels, rows, columns = pixels.shape
    bytes_of_image = pixels.permute(1, 2, 0).contiguous()
    # An explicit stride of the batch dimension marks one image as channels-last, so that the result
    # is too.
    image = bytes_of_image.as_strided(
        (1, channels, rows, columns), (pixels.numel(), 1, channels * columns, channels)
    )
    if (rows, columns) == (height, width):
        return image[0]
    return interpolate(image, (height, width), mode=interpolation.value, antialias=True)[0]


def open_cache(source: ImageSource, files: Sequence[Path], config: DataConfig) -> SampleCache:
    """Let `source` use the cache of a recipe, and return the cache.

    Args:
        source: source of the images.
        files: files of the training and validation images.
        config: the key `cache_gb`.
    """
    root = Path(
        os.path.commonpath([os.path.abspath(file.parent) for file in files]) if files else ""
    )
    description = source.description()
    limit = None if config.cache_gb is None else int(config.cache_gb * 1e9)
    folder = cache_folder() / cache_name(root, description)
    cache = SampleCache(
        folder, {"source": str(root), **description}, limit=limit, samples=len(files)
    )
    source.use_cache(cache)
    return cache
