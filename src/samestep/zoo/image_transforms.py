"""Transforms of training and validation images: crops, augmentation and normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import torch
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch.utils.data import default_collate

from samestep.data.batch import Collate
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.image_files import crop_long_image

make_torchvision_importable()

from torchvision.transforms import v2  # noqa: E402

# Mean and standard deviation of ImageNet, with which torchvision's weights were trained.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_MAX_MAGNITUDE = 30

Transform = Callable[[Image.Image], torch.Tensor]

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Probability = Annotated[float, Field(ge=0, le=1)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_FORBID = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_FORBID)
class Augment:
    """Augmentation of training images. Random numbers are a function of (seed, epoch, sample).

    Those of mixup and CutMix, which collate, are a function of the first sample of the batch:
    `data/read_generators.py` seeds the generators before each.

    Attributes:
        scale: minimum and maximum area of a random crop, as fractions of the image (Szegedy et al.,
            "Going deeper with convolutions", 2015), which is resized to `image_size`.
        flip: probability of a horizontal flip.
        randaugment: magnitude of the two operations of RandAugment (Cubuk et al., 2020), or None.
        random_erasing: probability of random erasing (Zhong et al., 2020).
        mixup_alpha: parameter of the Beta distribution of mixup (Zhang et al., "mixup", 2018); 0
            for none. Images and targets are mixed within a batch.
        cutmix_alpha: the same for CutMix (Yun et al., "CutMix", 2019). With both, one is drawn for
            each batch.
    """

    scale: tuple[_Fraction, _Fraction] = (0.08, 1.0)
    flip: _Probability = 0.5
    randaugment: Annotated[int, Field(ge=0, le=_MAX_MAGNITUDE)] | None = None
    random_erasing: _Probability = 0.0
    mixup_alpha: _NotNegative = 0.0
    cutmix_alpha: _NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.scale[0] > self.scale[1]:
            raise ValueError("scale is not a minimum and a maximum")

    def collate(self, classes: int) -> Collate | None:
        """Return a collate function for mixup and CutMix, or None if both are off."""
        mixes = [
            kind(alpha=float(alpha), num_classes=classes)
            for kind, alpha in ((v2.MixUp, self.mixup_alpha), (v2.CutMix, self.cutmix_alpha))
            if alpha
        ]
        if not mixes:
            return None
        mix = mixes[0]
        if len(mixes) > 1:
            mix = v2.RandomChoice(mixes)

        def mixed(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
            images, labels = mix(*default_collate(samples))
            return images, labels

        return mixed


@dataclass(frozen=True, config=_FORBID)
class ImageTransforms:
    """Resizing, cropping and normalization of images: options of every dataset of images.

    Attributes:
        image_size: height and width in pixels.
        crop_fraction: validation images are resized to a shorter side of `image_size /
            crop_fraction` and center-cropped.
        interpolation: `bilinear` or `bicubic`.
        mean: mean of each channel, for values in 0..1.
        std: standard deviation of each channel.
        augment: augmentation of training images; None for the default.
    """

    image_size: _Count = 224
    crop_fraction: _Fraction = 0.875
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[_Number, _Number, _Number] = MEAN
    std: tuple[_Positive, _Positive, _Positive] = STD
    augment: Augment | None = None

    @property
    def augmentation(self) -> Augment:
        """Augmentation of training images."""
        return self.augment or Augment()

    def train(self) -> Transform:
        """Return the transform of training images: a random crop and the augmentation."""
        augment = self.augmentation
        mode = v2.InterpolationMode(self.interpolation)
        steps: list[Callable[..., Any]] = [
            v2.RandomResizedCrop(self.image_size, scale=augment.scale, interpolation=mode),
            v2.RandomHorizontalFlip(augment.flip),
        ]
        if augment.randaugment is not None:
            steps.append(
                # One more: magnitudes begin at 0.
                v2.RandAugment(2, augment.randaugment, num_magnitude_bins=_MAX_MAGNITUDE + 1)
            )
        steps += self._normalized()
        # After the normalization: an erased pixel is zero, the mean of the channel.
        if augment.random_erasing:
            steps.append(v2.RandomErasing(augment.random_erasing))
        return _composed(steps)

    def validation(self) -> Transform:
        """Return the transform of validation images: resize and center crop."""
        size = round(self.image_size / self.crop_fraction)
        resize = v2.Resize(size, interpolation=v2.InterpolationMode(self.interpolation))
        steps = [crop_long_image, resize, v2.CenterCrop(self.image_size)]
        return _composed([*steps, *self._normalized()])

    def _normalized(self) -> list[Callable[..., Any]]:
        return [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(self.mean), list(self.std)),
        ]


def _composed(steps: list[Callable[..., Any]]) -> Transform:
    return cast(Transform, v2.Compose([*steps, v2.ToPureTensor()]))
