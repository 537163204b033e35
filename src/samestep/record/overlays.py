"""What a model makes of pictures, as pictures: classes in colour over what it saw."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

Classes = NDArray[numpy.int64]

_SEEN_THROUGH = 0.5
_GOLDEN = 0.61803398875  # hues that follow one another by this are never close to one another
_GAP = 4  # pixels between pictures that stand side by side


def class_map(outputs: torch.Tensor) -> Classes:
    """The class of each pixel or voxel of one sample, from its logits `(C, ...)`; of one channel, 1 is its class."""
    logits = outputs.detach()
    numbers = (logits[0] > 0).long() if logits.shape[0] == 1 else logits.argmax(dim=0)
    found: Classes = numbers.cpu().numpy()
    return found


def areas(numbers: Classes, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The share of each class; with one class, of that alone."""
    first = 1 if len(classes) == 1 else 0
    shares = [float((numbers == number).mean()) for number in range(first, first + len(classes))]
    return [{"class": name, "share": share} for name, share in zip(classes, shares, strict=True)]


def blended(image: Image.Image, numbers: Classes, *, is_binary: bool) -> Image.Image:
    """`image` with its classes in colour; what is 0 or negative (background, or ignored) stays as it is.

    Args:
        numbers: `(H, W)`, made as large as the image.
        is_binary: there is one class, which is red.
    """
    colours = numpy.array([(0, 0, 0), *class_colours(1 if is_binary else int(numbers.max(initial=0)))], numpy.uint8)
    known = numbers.clip(min=0)
    flat = Image.fromarray(colours[known]).resize(image.size, Image.Resampling.NEAREST)
    covered = Image.fromarray((known > 0).astype(numpy.uint8) * round(255 * _SEEN_THROUGH))
    return Image.composite(flat, image.convert("RGB"), covered.resize(image.size, Image.Resampling.NEAREST))


def class_colours(count: int) -> list[tuple[int, int, int]]:
    """Colours that can be told apart, the first one red; each stays what it is however many there are."""
    hues = [(number * _GOLDEN) % 1 for number in range(count)]
    parts = [colorsys.hsv_to_rgb(hue, 0.85, 1.0) for hue in hues]
    return [(round(255 * red), round(255 * green), round(255 * blue)) for red, green, blue in parts]


def overlay(inputs: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor) -> Image.Image:
    """One sample: what the model saw, that with what is wanted, and that with what the model says, side by side.

    Of a volume, the middle slice along its first axis.

    Args:
        inputs: `(channels, [D,] H, W)`; brightness goes from the least value to the largest.
        targets: class numbers `([D,] H, W)`, or zeros and ones `(1, [D,] H, W)`; negative ones are ignored.
        outputs: logits `(C, [D,] H, W)`.
    """
    wanted = targets[0] if targets.is_floating_point() else targets
    pixels, found = inputs.detach().float().cpu(), class_map(outputs)
    asked: Classes = wanted.detach().long().cpu().numpy()
    if found.ndim == 3:
        middle = found.shape[0] // 2
        pixels, found, asked = pixels[:, middle], found[middle], asked[middle]
    image, is_binary = _picture(pixels), outputs.shape[0] == 1
    return side_by_side([image, *(blended(image, numbers, is_binary=is_binary) for numbers in (asked, found))])


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one height in a row, with white between them."""
    width = sum(picture.width for picture in pictures) + _GAP * (len(pictures) - 1)
    row = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white")
    left = 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width + _GAP
    return row


def is_overlaid(inputs: Any, targets: Any, outputs: Any) -> bool:
    """Whether a batch is one of images or volumes with a class for each pixel or voxel."""
    if not all(isinstance(value, torch.Tensor) for value in (inputs, targets, outputs)):
        return False
    places = outputs.shape[2:]
    is_dense = len(places) in (2, 3) and inputs.shape[2:] == places
    return is_dense and tuple(targets.shape) in ((len(outputs), *places), (len(outputs), 1, *places))


def write_overlays(
    folder: Path, samples: Sequence[int], inputs: torch.Tensor, targets: torch.Tensor, outputs: torch.Tensor
) -> list[Path]:
    """A PNG a sample, named by its number; ranks that have different samples write to the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"sample-{number:06}.png" for number in samples]
    for path, *sample in zip(paths, inputs, targets, outputs, strict=True):
        overlay(*sample).save(path)
    return paths


def _picture(pixels: torch.Tensor) -> Image.Image:
    least, most = pixels.min(), pixels.max()
    bright = ((pixels - least) / (most - least).clamp(min=1e-12) * 255).round().to(torch.uint8)
    colours = bright if bright.shape[0] == 3 else bright[:1].expand(3, -1, -1)
    return Image.fromarray(colours.permute(1, 2, 0).contiguous().numpy())
