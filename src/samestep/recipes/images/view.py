"""How an image becomes what a model sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from samestep.config.check import require
from samestep.recipes.images.augment import Augment
from samestep.runtime.vision import make_torchvision_importable

# Mean and standard deviation of ImageNet's pixels, which torchvision's weights were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_INTERPOLATIONS = ("bilinear", "bicubic")
# An image whose longer side is more of its shorter one is cut to that in the middle, before it is made larger.
_LONGEST = 4

Transform = Callable[[Image.Image], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class View:
    """Size, cut and scale of the images that a model sees.

    Attributes:
        image_size: pixels of the square.
        crop_fraction: evaluation resizes the shorter side to `image_size / crop_fraction` and takes the centre.
        interpolation: `bilinear` or `bicubic`.
        mean: of each channel, subtracted from values in 0..1.
        std: of each channel, what is divided by then.
    """

    image_size: int
    crop_fraction: float
    interpolation: str
    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        size, fraction = self.image_size, self.crop_fraction
        require(
            isinstance(size, int) and size >= 1,
            f"data.options.image_size is {size!r}",
            "a number of pixels",
            "set data.options.image_size: 224",
        )
        require(
            isinstance(fraction, int | float) and 0 < fraction <= 1,
            f"data.options.crop_fraction is {fraction!r}",
            "0 < crop_fraction <= 1",
            "set data.options.crop_fraction: 0.875",
        )
        require(
            self.interpolation in _INTERPOLATIONS,
            f"data.options.interpolation is {self.interpolation!r}",
            f"one of {', '.join(_INTERPOLATIONS)}",
            "set data.options.interpolation: bilinear",
        )
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            are_three = isinstance(numbers, list | tuple) and len(numbers) == 3
            require(
                are_three and all(isinstance(n, int | float) and (name == "mean" or n > 0) for n in numbers),
                f"data.options.{name} is {numbers!r}",
                "three numbers, for red, green and blue" + (", above 0" if name == "std" else ""),
                f"set data.options.{name}: [0.5, 0.5, 0.5]",
            )

    def training(self, augment: Augment) -> Transform:
        """A random part of an image, changed as `augment` says."""
        v2, interpolation = self._v2()
        crop = v2.RandomResizedCrop(self.image_size, scale=tuple(augment.scale), interpolation=interpolation)
        transforms = [crop, *augment.of_images(), *self._to_tensor(v2), *augment.of_tensors(), v2.ToPureTensor()]
        made: Transform = v2.Compose(transforms)
        return made

    def evaluating(self) -> Transform:
        """The centre of an image."""
        v2, interpolation = self._v2()
        shorter = round(self.image_size / self.crop_fraction)
        cut = [_middle, v2.Resize(shorter, interpolation=interpolation), v2.CenterCrop(self.image_size)]
        made: Transform = v2.Compose([*cut, *self._to_tensor(v2), v2.ToPureTensor()])
        return made

    def _v2(self) -> tuple[Any, Any]:
        make_torchvision_importable()
        from torchvision.transforms import v2

        return v2, v2.InterpolationMode(self.interpolation)

    def _to_tensor(self, v2: Any) -> list[Callable[..., Any]]:
        return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(self.mean), list(self.std))]


def _middle(image: Image.Image) -> Image.Image:
    """The middle of a very long image: a line of one pixel would grow to gigabytes with its shorter side."""
    width, height = image.size
    longest = _LONGEST * min(width, height)
    if max(width, height) <= longest:
        return image
    left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
    return image.crop((left, top, left + min(width, longest), top + min(height, longest)))
