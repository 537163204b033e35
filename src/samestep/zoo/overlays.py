"""Overlays of segmentation targets and predictions on images."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

from samestep.distributed.device_reads import device_reads

Classes = NDArray[numpy.int64]

_ALPHA = 0.5
_GOLDEN_RATIO = 0.61803398875  # as a step between hues, keeps all hues apart
_GAP = 4  # pixels between images in a row


def class_map(outputs: torch.Tensor) -> Classes:
    """Return the class of each pixel of a sample from logits `(C, H, W)`.

    With one channel, the classes are 0 and 1.
    """
    logits = outputs.detach()
    classes = logits.argmax(dim=0)
    if logits.shape[0] == 1:
        classes = (logits[0] > 0).long()
    return device_reads.copy(classes).numpy()


def areas(classes: Classes, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the share of each class; with one name, only that of class 1."""
    first = 1 if len(names) == 1 else 0
    shares = [float((classes == number).mean()) for number in range(first, first + len(names))]
    return [{"class": name, "share": share} for name, share in zip(names, shares, strict=True)]


def blended(image: Image.Image, classes: Classes, *, is_binary: bool) -> Image.Image:
    """Return `image` with classes `(H, W)` in color, scaled to the size of `image`.

    A single class (`is_binary`) is red. Background (0) and ignored (negative) pixels are unchanged.
    """
    count = 1 if is_binary else int(classes.max(initial=0))
    colors = numpy.array([(0, 0, 0), *class_colors(count)], numpy.uint8)
    classes = classes.clip(min=0)
    # The nearest neighbour: a mean of class numbers would be another class.
    flat = Image.fromarray(colors[classes]).resize(image.size, Image.Resampling.NEAREST)
    mask = Image.fromarray((classes > 0).astype(numpy.uint8) * round(255 * _ALPHA))
    return Image.composite(
        flat, image.convert("RGB"), mask.resize(image.size, Image.Resampling.NEAREST)
    )


def class_colors(count: int) -> list[tuple[int, int, int]]:
    """Return distinct RGB colors, the first one red; a color does not depend on `count`."""
    hues = [(number * _GOLDEN_RATIO) % 1 for number in range(count)]
    colors = [colorsys.hsv_to_rgb(hue, 0.85, 1.0) for hue in hues]
    return [
        (round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in colors
    ]


def overlay(inputs: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor) -> Image.Image:
    """Return one sample as images in a row: input, input with targets, with predictions.

    Args:
        inputs: `(channels, H, W)`, scaled from the least to the largest value.
        targets: class indices `(H, W)`, or binary `(1, H, W)`; negative values are ignored.
        outputs: logits `(C, H, W)`.
    """
    if targets.is_floating_point():
        targets = targets[0]
    predicted = class_map(outputs)
    expected: Classes = device_reads.copy(targets.detach().long()).numpy()
    image = scaled_image(inputs)
    is_binary = outputs.shape[0] == 1
    layers = [blended(image, one, is_binary=is_binary) for one in (expected, predicted)]
    row = Image.new("RGB", (3 * image.width + 2 * _GAP, image.height), "white")
    for number, layer in enumerate((image, *layers)):
        row.paste(layer, (number * (image.width + _GAP), 0))
    return row


def owner_of_classes(inputs: Any, targets: Any, outputs: Any) -> Literal["pixel", "image"] | None:
    """Return what has a class in a batch of images; None for other batches."""
    if not all(isinstance(value, torch.Tensor) for value in (inputs, targets, outputs)):
        return None
    shape = outputs.shape[2:]
    is_dense = len(shape) == 2 and inputs.shape[2:] == shape
    if is_dense and tuple(targets.shape) in ((len(outputs), *shape), (len(outputs), 1, *shape)):
        return "pixel"
    is_picture = inputs.dim() == 4 and inputs.shape[1] in (1, 3)
    is_class = outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point()
    if is_picture and is_class and outputs.shape[1] > 1:
        return "image"
    return None


def write_pictures(folder: Path, samples: Sequence[int], pictures: Iterable[Image.Image]) -> None:
    """Write one PNG per sample, named by the number of the sample."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, picture in zip(samples, pictures, strict=True):
        picture.save(folder / f"sample-{number:06}.png")


def scaled_image(inputs: torch.Tensor) -> Image.Image:
    """Return `inputs` `(channels, H, W)`, scaled from the least to the largest value."""
    pixels = device_reads.copy(inputs.detach().float())
    low = pixels.min()
    high = pixels.max()
    # At least a small range: all pixels can be equal.
    scaled = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    channels = scaled if scaled.shape[0] == 3 else scaled[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())
