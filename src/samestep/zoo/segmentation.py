"""Images and masks of the same name in two folders, and their joint transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import torch
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.data_files import fingerprint_of
from samestep.zoo.image_files import read_image
from samestep.zoo.image_transforms import MEAN, STD
from samestep.zoo.losses import IGNORED
from samestep.zoo.masks import ClassNumbers, MaskCode, Pair, read_mask, split_pairs
from samestep.zoo.options import unusable, validated
from samestep.zoo.overlays import areas, blended, class_map
from samestep.zoo.splits import Splits, Task

make_torchvision_importable()

from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

_Side = Annotated[int, Field(ge=1)]
_Fraction = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MaskTransforms:
    """Joint transforms of images and masks: options of the dataset.

    Attributes:
        image_size: height and width, or both.
        fit: `resize` changes the size without keeping proportions. `crop` takes a random part with
            augmentation, else the center; smaller images are padded with zeros, and their masks
            with `IGNORED`.
        flips: axes that are flipped with probability 0.5.
        scale: minimum and maximum area of a random crop with `fit: resize`, as fractions of the
            image.
    """

    image_size: _Side | tuple[_Side, _Side] = 256
    fit: Literal["resize", "crop"] = "resize"
    flips: Literal["none", "horizontal", "both"] = "horizontal"
    scale: tuple[_Fraction, _Fraction] = (0.5, 1.0)

    def train(self) -> JointTransform:
        """Return the transform of training images, with augmentation by torch's generator."""
        if self.fit == "crop":
            steps = [partial(_pad, size=self._sides), v2.RandomCrop(self._sides)]
        elif self.scale[0] < 1:
            steps = [v2.RandomResizedCrop(self._sides, scale=self.scale)]
        else:
            # A crop of the whole area would still change the aspect ratio.
            steps = [v2.Resize(self._sides)]
        if self.flips != "none":
            steps.append(v2.RandomHorizontalFlip())
        if self.flips == "both":
            steps.append(v2.RandomVerticalFlip())
        return JointTransform(v2.Compose(steps))

    def validation(self) -> JointTransform:
        """Return the transform of validation images."""
        if self.fit == "crop":
            steps = [partial(_pad, size=self._sides), v2.CenterCrop(self._sides)]
            return JointTransform(v2.Compose(steps))
        return JointTransform(v2.Resize(self._sides))

    @property
    def _sides(self) -> tuple[int, int]:
        if isinstance(self.image_size, int):
            return (self.image_size, self.image_size)
        return self.image_size


class JointTransform:
    """Transform of an RGB image and its class numbers to tensors `(3, H, W)` and `(H, W)`."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self._transform = transform

    def __call__(self, image: Image.Image, mask: ClassNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized image and its class numbers."""
        pixels, numbers = self._apply(image, mask)
        scaled = functional.to_dtype(pixels, torch.float32, scale=True)
        return functional.normalize(scaled, list(MEAN), list(STD)), numbers

    def resized(self, image: Image.Image) -> Image.Image:
        """Return the image after resizing or cropping, without normalization."""
        result: Image.Image = functional.to_pil_image(self._apply(image, _no_mask(image))[0])
        return result

    def _apply(self, image: Image.Image, mask: ClassNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        # With these types, both have one crop and flip, and masks are resized to the nearest value.
        pixels = tv_tensors.Image(functional.pil_to_tensor(image))
        numbers = tv_tensors.Mask(torch.from_numpy(mask))
        pixels, numbers = self._transform(pixels, numbers)
        return pixels.as_subclass(torch.Tensor), numbers.as_subclass(torch.Tensor)


def _pad(image: torch.Tensor, mask: torch.Tensor, *, size: tuple[int, ...]) -> tuple[Any, Any]:
    """Return image and mask, padded equally on both sides if smaller than `size`."""
    height = max(0, size[0] - image.shape[-2])
    width = max(0, size[1] - image.shape[-1])
    top = height // 2
    left = width // 2
    padding = [left, top, width - left, height - top]
    return functional.pad(image, padding, fill=0), functional.pad(mask, padding, fill=IGNORED)


def _no_mask(image: Image.Image) -> ClassNumbers:
    return numpy.zeros((image.height, image.width), numpy.int16)


class MaskedImages:
    """Image files with their masks, decoded and transformed on access.

    Targets are floating-point zeros and ones `(1, H, W)` for binary masks, else class numbers `(H,
    W)`; -100 is ignored.
    """

    def __init__(self, pairs: Sequence[Pair], code: MaskCode, transform: JointTransform) -> None:
        self._pairs = pairs
        self._code = code
        self._transform = transform

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._pairs[index]
        image = read_image(pair.image)
        mask = read_mask(pair.mask, self._code)
        if mask.shape != (image.height, image.width):
            sizes = f"{mask.shape[1]} x {mask.shape[0]} pixels"
            problem = f"{pair.mask} has {sizes}, {pair.image} has {image.width} x {image.height}"
            expected = "masks of the size of their images"
            raise unusable(problem, expected, "correct the pair and resume", "E_MASK")
        pixels, numbers = self._transform(image, mask)
        if self._code.is_binary:
            return pixels, numbers.to(torch.float32).unsqueeze(0)
        return pixels, numbers.to(torch.int64)


def load_segmentation(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    mask_suffix: str = "",
    classes: Sequence[str] | None = None,
    mask_values: Sequence[Any] | None = None,
    ignore_values: Sequence[Any] = (),
    **options: Any,
) -> Splits:
    """Return images and masks, with the options of `docs/guides/segmentation.md`.

    Raises:
        InputError: a folder is missing, files have no partner, or an option is invalid.
    """
    values = {"classes": classes, "mask_values": mask_values, "ignore_values": ignore_values}
    code = validated(MaskCode, values)
    transforms = validated(MaskTransforms, options, loader=load_segmentation)
    pairs, evaluation_pairs = split_pairs(path, evaluation_path, evaluation_fraction, mask_suffix)
    return Splits(
        train=MaskedImages(pairs, code, transforms.train()),
        evaluation=MaskedImages(evaluation_pairs, code, transforms.validation()),
        classes=code.names,
        reads_files=True,
        fingerprint=fingerprint_of([pair.name for pair in pairs]),
    )


def segmentation_task(
    classes: Sequence[str],
    *,
    image_size: int | Sequence[int] = 256,
    fit: Literal["resize", "crop"] = "resize",
) -> Task:
    """Return the task that segments an image: shares of classes, and the image in their colors."""
    options = {"image_size": image_size, "fit": fit}
    transform = validated(MaskTransforms, options).validation()

    def read(path: Path) -> torch.Tensor:
        image = read_image(path)
        return transform(image, _no_mask(image))[0]

    def picture(path: Path, outputs: torch.Tensor) -> Image.Image:
        image = read_image(path)
        # Classes of a crop are those of the center; others are scaled to the whole image.
        if fit == "crop":
            image = transform.resized(image)
        return blended(image, class_map(outputs), is_binary=len(classes) == 1)

    return Task(
        reads="an image file",
        read=read,
        describe=lambda outputs: {"areas": areas(class_map(outputs), classes)},
        picture=picture,
    )
