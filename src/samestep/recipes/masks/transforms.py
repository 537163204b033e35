"""Images and their masks made one size and varied, both in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy
import torch
from PIL import Image

from samestep.errors import DataError
from samestep.recipes.images.view import MEAN, STD
from samestep.recipes.masks.code import IGNORED, Numbers
from samestep.runtime.vision import make_torchvision_importable

Fit = Literal["resize", "crop"]
Flips = Literal["none", "horizontal", "both"]
Joint = Callable[[Image.Image, Numbers], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Variation:
    """How images and masks vary in training.

    Attributes:
        flips: half of the images are mirrored: left to right, or both ways.
        scale: with `resize`, a random part of the image whose area is between these fractions of the whole.
        jitter: brightness and contrast vary by up to this fraction.
    """

    flips: Flips = "none"
    scale: Sequence[float] = (1.0, 1.0)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _require_word("flips", self.flips, get_args(Flips))
        scale = self.scale
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise DataError(
                f"data.options.scale is {list(scale)}", rule="two fractions, 0 < least <= most <= 1", do="[0.5, 1.0]"
            )
        if not 0 <= self.jitter <= 1:
            raise DataError(f"data.options.jitter is {self.jitter}", rule="0 <= jitter <= 1", do="jitter: 0.2")


class JointTransform:
    """From an RGB image and its class numbers to tensors `(3, H, W)` and `(H, W)` of one size.

    Args:
        size: height and width.
        fit: `resize` changes the size of the whole, without keeping its proportions; `crop` takes a part of this size
            (a random one where something varies, else the centre), and what an image is too small for is dark and
            ignored.
        variation: for training; draws from torch's generator.
    """

    def __init__(self, size: tuple[int, int], fit: Fit = "resize", variation: Variation | None = None) -> None:
        _require_word("fit", fit, get_args(Fit))
        self._apply = _composed(size, fit, variation)

    def __call__(self, image: Image.Image, mask: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        """The image normalised, and its class numbers."""
        from torchvision.transforms.v2 import functional

        pixels, numbers = self._moved(image, mask)
        scaled = functional.to_dtype(pixels, torch.float32, scale=True)
        return functional.normalize(scaled, list(MEAN), list(STD)), numbers

    def shown(self, image: Image.Image) -> Image.Image:
        """The image as large as it becomes, and otherwise as it is."""
        from torchvision.transforms.v2 import functional

        pixels, _ = self._moved(image, numpy.zeros((image.height, image.width), numpy.int16))
        found: Image.Image = functional.to_pil_image(pixels)
        return found

    def _moved(self, image: Image.Image, mask: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        pixels, numbers = tv_tensors.Image(functional.pil_to_tensor(image)), tv_tensors.Mask(torch.from_numpy(mask))
        moved, joined = self._apply(pixels, numbers)
        return moved.as_subclass(torch.Tensor), joined.as_subclass(torch.Tensor)


def _require_word(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise DataError(
            f"data.options.{what} is {word!r}", rule=f"one of {', '.join(words)}", do=f"data.options.{what}={words[0]}"
        )


def _composed(size: tuple[int, int], fit: Fit, variation: Variation | None) -> Callable[..., Any]:
    make_torchvision_importable()
    from torchvision.transforms import v2

    sides = list(size)
    if fit == "crop":
        steps = [_Padded(size), v2.RandomCrop(sides) if variation else v2.CenterCrop(sides)]
    elif variation and variation.scale[0] < 1:
        steps = [v2.RandomResizedCrop(sides, scale=tuple(variation.scale))]
    else:
        steps = [v2.Resize(sides)]
    if variation and variation.flips != "none":
        steps += [v2.RandomHorizontalFlip(), *([v2.RandomVerticalFlip()] if variation.flips == "both" else [])]
    if variation and variation.jitter > 0:
        steps.append(v2.ColorJitter(brightness=variation.jitter, contrast=variation.jitter))
    return v2.Compose(steps)  # type: ignore[no-any-return]


class _Padded:
    """Pads what is smaller than a size, as much on each side; a mask is ignored there."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._size = size

    def __call__(self, image: torch.Tensor, mask: torch.Tensor) -> tuple[Any, Any]:
        from torchvision.transforms.v2 import functional

        missing = [max(0, wanted - have) for wanted, have in zip(self._size, image.shape[-2:], strict=True)]
        top, left = (number // 2 for number in missing)
        padding = [left, top, missing[1] - left, missing[0] - top]
        return functional.pad(image, padding, fill=0), functional.pad(mask, padding, fill=IGNORED)
