"""Crops of encoded images, decoded at a reduced scale if the crop has more pixels than the model input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import interpolate

from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.images.decoders import Box, DecodedImage, LazyImage, as_pixels, cropped_pixels

make_torchvision_importable()

from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

# Longer images are cropped to this aspect ratio before their shorter side is resized.
_MAX_ASPECT_RATIO = 4


def limit_aspect_ratio(height: int, width: int) -> Box:
    """Return the center of a very long image; resizing an image of one pixel in width would need gigabytes."""
    longest = _MAX_ASPECT_RATIO * min(height, width)
    return max(0, height - longest) // 2, max(0, width - longest) // 2, min(height, longest), min(width, longest)


class RandomCrop(v2.RandomResizedCrop):  # type: ignore[misc]
    """Random crop of an `EncodedImage` to `(3, size, size)` bytes, with the random numbers of the base class."""

    def forward(self, image: LazyImage) -> torch.Tensor:
        """Return the resized crop."""
        box = self.make_params([torch.empty(3, image.height, image.width, device="meta")])
        height, width = self.size
        pixels = cropped_pixels(image, (box["top"], box["left"], box["height"], box["width"]), height, width)
        return _resized(pixels, height, width, self.interpolation)


@dataclass(frozen=True)
class PlainCrop:
    """Random crop without a resize, and a horizontal flip. Draws three numbers of torch's generator.

    Only the pixels of the crop are read, so the cost does not depend on the size of a cached image.

    Attributes:
        size: height and width in pixels.
        flip: probability of a flip.
    """

    size: int
    flip: float

    def __call__(self, image: DecodedImage) -> torch.Tensor:
        """Return the bytes `(3, size, size)`, with the channels last in memory."""
        pixels = as_pixels(image).permute(1, 2, 0)
        top, left, side = torch.rand(3, dtype=torch.float64).tolist()
        top, left = (int(at * (length - self.size + 1)) for at, length in zip((top, left), pixels.shape, strict=False))
        crop = pixels[top : top + self.size, left : left + self.size]
        return (crop.flip(1) if side < self.flip else crop.clone()).permute(2, 0, 1)


class RandomFlip:
    """Horizontal flip of a tensor with torchvision's random number, in a third of the time of torchvision's class."""

    def __init__(self, probability: float) -> None:
        self._probability = probability

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels or their mirror image."""
        return pixels.flip(-1) if torch.rand(1).item() < self._probability else pixels


class CenterCrop:
    """Center `(3, size, size)` of an `EncodedImage`, after its shorter side is resized to `resized_size`."""

    def __init__(self, size: int, resized_size: int, interpolation: v2.InterpolationMode) -> None:
        self._size, self._resized_size, self._interpolation = size, resized_size, interpolation

    def __call__(self, image: LazyImage) -> torch.Tensor:
        """Return the resized center as bytes."""
        resized = resize_shorter_side(image, self._resized_size, self._interpolation)
        center: torch.Tensor = functional.center_crop(resized, [self._size, self._size])
        return center


def resize_shorter_side(image: LazyImage, length: int, interpolation: v2.InterpolationMode) -> torch.Tensor:
    """Return the bytes `(3, H, W)` of an image with a shorter side of `length` pixels; very long ones are cropped."""
    box = limit_aspect_ratio(image.height, image.width)
    pixels = cropped_pixels(image, box, length, length)
    height, width = (max(length, length * side // min(box[2:])) for side in box[2:])
    return _resized(pixels, height, width, interpolation)


def _resized(pixels: torch.Tensor, height: int, width: int, interpolation: v2.InterpolationMode) -> torch.Tensor:
    """Return the pixels `(3, height, width)`; torch resizes bytes fastest with the channels last in memory."""
    channels, rows, columns = pixels.shape
    bytes_of_image = pixels.permute(1, 2, 0).contiguous()
    # An explicit stride of the batch dimension marks one image as channels-last, so that the result is too.
    image = bytes_of_image.as_strided((1, channels, rows, columns), (pixels.numel(), 1, channels * columns, channels))
    if (rows, columns) == (height, width):
        return image[0]
    return interpolate(image, (height, width), mode=interpolation.value, antialias=True)[0]
