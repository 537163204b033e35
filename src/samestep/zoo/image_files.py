"""Reading of image files: errors of damaged files, decoders with reduced scales, and a cache.

Decisions: docs/decisions/images.md
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy
import PIL
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from torch.nn.functional import interpolate

from samestep.config.recipe import DataConfig
from samestep.distributed.env import cache_folder
from samestep.errors import RunError, SamestepError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import import_optional, unusable
from samestep.zoo.sample_cache import CachedSample, SampleCache, cache_name, file_key

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
# Divisors of height and width for which libjpeg-turbo has a fast reduced transform.
SCALES = (8, 4, 2)
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
_CHANNELS = 3
# Longer images are cropped to this aspect ratio before their shorter side is resized.
_MAX_ASPECT_RATIO = 4

Decoder = Literal["pillow", "simplejpeg"]
# From a file and its name in errors to an image for a transform.
ReadImage = Callable[[Path | BytesIO, str], Any]
Box = tuple[int, int, int, int]  # top, left, height, width


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
    with _open_header(source) as image:
        # Cameras store the orientation separately from the pixels.
        ImageOps.exif_transpose(image, in_place=True)
        yield image


@contextmanager
def _open_header(source: Path | BytesIO) -> Iterator[Image.Image]:
    """Yield an image before its pixels are decoded, in the orientation of the file."""
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        image = Image.open(source, formats=_FORMATS)
    with image:
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


class _StoredImage:
    """Pixels `(3, height, width)` at one scale, such as those of a cache."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self._pixels = pixels
        _, self.height, self.width = pixels.shape

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return all pixels, at any scale."""
        return self._pixels


class EncodedImage:
    """Image file in memory of which only the header is decoded, so that a crop selects the scale.

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
            is_supported = False
            try:
                with _open_header(BytesIO(self._data)) as header:
                    is_supported = header.format in ("JPEG", "MPO") and header.mode == "RGB"
                    self._size = header.size
                    if is_supported:
                        orientation = header.getexif().get(ExifTags.Base.Orientation, 1)
                        # An unknown number is ignored, as by Pillow.
                        self._upright = _UPRIGHT.get(orientation, (False, ()))
            except UnidentifiedImageError:  # raised by `read_image` with the name of the file
                is_supported = False
            if not is_supported:
                self._image = read_image(source, name)
                self._size = self._image.size
                self._upright = (False, ())
        self.width, self.height = self._size
        if self._upright[0]:
            self.height, self.width = self._size

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return the upright RGB image `(3, height, width)` as bytes, with the channels last.

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
            except ValueError:  # Pillow reads some damaged files, and has the errors of the others
                self._image = read_image(self._source, self._name)
            else:
                pixels = torch.from_numpy(array).permute(2, 0, 1)
                is_transposed, flipped = self._upright
                if is_transposed:
                    pixels = pixels.transpose(1, 2)
                if flipped:
                    return pixels.flip(flipped)
                return pixels
        return as_pixels(self._image)


def image_reader(decoder: Decoder) -> ReadImage:
    """Return the function that reads images: as RGB images of Pillow, or as `EncodedImage`.

    Raises:
        RecipeError: the library of the decoder is not installed.
    """
    if decoder == "pillow":
        return read_image
    library = import_optional(decoder, f"data.options.decoder {decoder}", extra="recipes")
    return partial(EncodedImage, library.decode_jpeg)


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
    """Return the pixels of a box at the smallest scale with at least `height` x `width` pixels."""
    scale = next((n for n in SCALES if box[2] >= n * height and box[3] >= n * width), 1)
    pixels = image.pixels(scale)

    def scaled(start: int, length: int, full: int, decoded: int) -> slice:
        stop = round((start + length) * decoded / full)
        return slice(round(start * decoded / full), max(1, stop))

    rows = scaled(box[0], box[2], image.height, pixels.shape[1])
    columns = scaled(box[1], box[3], image.width, pixels.shape[2])
    return pixels[:, rows, columns]


def _center_of_long_image(height: int, width: int) -> Box:
    """Return the box to resize; resizing an image of one pixel in width would need gigabytes."""
    longest = _MAX_ASPECT_RATIO * min(height, width)
    top = max(0, height - longest) // 2
    left = max(0, width - longest) // 2
    return top, left, min(height, longest), min(width, longest)


def crop_long_image(image: Image.Image) -> Image.Image:
    """Return the center of a very long image of Pillow, or another image unchanged."""
    top, left, height, width = _center_of_long_image(image.height, image.width)
    if (width, height) == image.size:
        return image
    return image.crop((left, top, left + width, top + height))


def resize_shorter_side(image: LazyImage, length: int, interpolation: str) -> torch.Tensor:
    """Return the bytes `(3, H, W)` of an image with a shorter side of `length` pixels."""
    box = _center_of_long_image(image.height, image.width)
    pixels = cropped_pixels(image, box, length, length)
    height, width = (max(length, length * side // min(box[2:])) for side in box[2:])
    return resize_pixels(pixels, height, width, interpolation)


def resize_pixels(
    pixels: torch.Tensor, height: int, width: int, interpolation: str
) -> torch.Tensor:
    """Return the pixels `(3, height, width)`, with the channels last in memory."""
    channels, rows, columns = pixels.shape
    # torch resizes bytes fastest with the channels last. An explicit stride of the batch dimension
    # marks one image as channels-last, so that the result is too.
    image = (
        pixels.permute(1, 2, 0)
        .contiguous()
        .as_strided((1, channels, rows, columns), (pixels.numel(), 1, channels * columns, channels))
    )
    if (rows, columns) == (height, width):
        return image[0]
    return interpolate(image, (height, width), mode=interpolation, antialias=True)[0]


@cache
def _pillow_resize(shorter_side: int, interpolation: str) -> Any:
    make_torchvision_importable()
    # Here, because digits and texts need this module without torchvision.
    from torchvision.transforms import v2

    return v2.Resize([shorter_side], interpolation=v2.InterpolationMode(interpolation))


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
            return self._prepared(self._decode(source, name))
        with file_errors(name, "an image"):
            status = os.stat(source)
        if self._decoder != "pillow" and self._shorter_side is None:
            return _CachedScales(self._cache, self._decode, source, status, name)
        key = file_key(source, status)
        sample = self._cache.get(key, name)
        if sample is not None:
            return _StoredImage(_tensor(sample))
        image = self._prepared(self._decode(source, name))
        _add_pixels(self._cache, key, as_pixels(image))
        return image

    def _prepared(self, image: DecodedImage) -> DecodedImage:
        """Return a decoded image after the fixed resize."""
        if self._shorter_side is None:
            return image
        if not isinstance(image, Image.Image):
            pixels = resize_shorter_side(image, self._shorter_side, self._interpolation)
            return _StoredImage(pixels)
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
        if self._decoder != "pillow":
            libraries[self._decoder] = version(self._decoder)
            if size is not None:  # torch resizes, with instructions of the processor
                capability = torch.backends.cpu.get_cpu_capability()
                libraries["torch"] = f"{torch.__version__} {capability}"
        return {
            "kind": "decoded",
            "decoder": self._decoder,
            "libraries": libraries,
            "shorter_side": size,
        }


class _CachedScales:
    """Image of a decoder with several scales.

    The size, and the pixels of each scale that was used, are entries of the cache.
    """

    def __init__(
        self, cache: SampleCache, decode: ReadImage, path: Path, status: os.stat_result, name: str
    ) -> None:
        self._cache = cache
        self._decode = partial(decode, path, name)
        self._key = partial(file_key, path, status)
        self._name = name
        self._image: LazyImage | None = None
        size = cache.get(self._key(variant=0), name)
        if size is None:
            image: LazyImage = self._decode()
            self._image = image
            self.height = image.height
            self.width = image.width
            cache.add(self._key(variant=0), memoryview(b"\0"), self.height, self.width)
        else:
            self.height = size.height
            self.width = size.width

    def pixels(self, scale: int = 1) -> torch.Tensor:
        """Return the pixels of a scale, as the decoder does."""
        key = self._key(variant=scale)
        sample = self._cache.get(key, self._name)
        if sample is not None:
            return _tensor(sample)
        image: LazyImage = self._image or self._decode()
        self._image = image
        pixels = image.pixels(scale)
        _add_pixels(self._cache, key, pixels)
        return pixels


def _tensor(sample: CachedSample) -> torch.Tensor:
    return sample.data.view(sample.height, sample.width, _CHANNELS).permute(2, 0, 1)


def _add_pixels(cache: SampleCache, key: str, pixels: torch.Tensor) -> None:
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    cache.add(key, array.data.cast("B"), *array.shape[:2])


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
