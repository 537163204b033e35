"""Transforms of training and validation images: crops, augmentation and normalization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import numpy
import torch
from PIL import Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch.utils.data import default_collate

from samestep.data.batch import Collate, SizedDataset, map_tensors
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.image_files import ImageSource, crop_long_image
from samestep.zoo.options import validated
from samestep.zoo.splits import Splits

make_torchvision_importable()

from torchvision.transforms import v2  # noqa: E402

# Mean and standard deviation of ImageNet, with which torchvision's weights were trained.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_MAX_MAGNITUDE = 30

Transform = Callable[[Any], torch.Tensor]  # of an image from `ImageTransforms.reader()`

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

    Attributes:
        scale: minimum and maximum area of a random crop, as fractions of the image (Szegedy et al.,
            "Going deeper with convolutions", 2015), which is resized to `image_size`; None for a
            random crop of `image_size` pixels without a resize, from images with a shorter side of
            a fixed length (Krizhevsky et al., "ImageNet classification with deep convolutional
            neural networks", 2012).
        flip: probability of a horizontal flip.
        randaugment: magnitude of the two operations of RandAugment (Cubuk et al., 2020), or None.
        random_erasing: probability of random erasing (Zhong et al., 2020).
        mixup_alpha: parameter of the Beta distribution of mixup (Zhang et al., "mixup", 2018); 0
            for none. Images and targets are mixed within a microbatch.
        cutmix_alpha: the same for CutMix (Yun et al., "CutMix", 2019). With both, one is drawn for
            each microbatch.
    """

    scale: tuple[_Fraction, _Fraction] | None = (0.08, 1.0)
    flip: _Probability = 0.5
    randaugment: Annotated[int, Field(ge=0, le=_MAX_MAGNITUDE)] | None = None
    random_erasing: _Probability = 0.0
    mixup_alpha: _NotNegative = 0.0
    cutmix_alpha: _NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.scale is not None and self.scale[0] > self.scale[1]:
            raise ValueError("scale is not a minimum and a maximum")

    @property
    def changes_floats(self) -> bool:
        """Whether normalized images are changed: erased, or mixed in a microbatch."""
        return bool(self.random_erasing or self.mixup_alpha or self.cutmix_alpha)

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


def collate_images(samples: list[Any]) -> Any:
    """Return a batch as torch's default; images of bytes keep the order in memory that they have.

    torch would move the channels of each image, in half of the time of a crop from a cache; the
    device does so faster.
    """
    images, labels = zip(*samples, strict=True)
    if images[0].dtype != torch.uint8:
        return default_collate(samples)
    pixels = default_collate([image.permute(1, 2, 0) for image in images])
    return pixels.permute(0, 3, 1, 2), default_collate(list(labels))


def image_transforms(options: Mapping[str, Any], loader: Callable[..., Any]) -> ImageTransforms:
    """Return the transforms of the options that a `loader` does not have itself.

    Raises:
        RecipeError: an option is unknown or has an invalid value.
    """
    return validated(ImageTransforms, options, loader=loader)


@dataclass(frozen=True)
class PlainCrop:
    """Random crop without a resize, and a horizontal flip.

    They draw three numbers of torch's generator. Only the pixels of the crop are read, so the cost
    does not depend on the size of a cached image.

    Attributes:
        size: height and width in pixels.
        flip: probability of a flip.
    """

    size: int
    flip: float

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Return the bytes `(3, size, size)`, with the channels last in memory."""
        pixels = torch.from_numpy(numpy.array(image))
        top, left, side = torch.rand(3, dtype=torch.float64).tolist()
        top, left = (
            int(at * (length - self.size + 1))
            for at, length in zip((top, left), pixels.shape, strict=False)
        )
        crop = pixels[top : top + self.size, left : left + self.size]
        if side < self.flip:
            return crop.flip(1).permute(2, 0, 1)
        return crop.clone().permute(2, 0, 1)


@dataclass(frozen=True, config=_FORBID)
class ImageTransforms:
    """Decoding, resizing, cropping and normalization of images: options of every dataset of images.

    Crops without a resize are bytes: `normalize` converts batches on the device. Random erasing,
    mixup and CutMix change normalized floats; with them the training images are floats too.

    Attributes:
        image_size: height and width in pixels.
        crop_fraction: validation images are resized to a shorter side of `image_size /
            crop_fraction` and center-cropped.
        interpolation: `bilinear` or `bicubic`.
        mean: mean of each channel, for values in 0..1.
        std: standard deviation of each channel.
        shorter_side: length to which the shorter side of an image is resized before all transforms,
            or None.
        augment: augmentation of training images; None for the default.
    """

    image_size: _Count = 224
    crop_fraction: _Fraction = 0.875
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[_Number, _Number, _Number] = MEAN
    std: tuple[_Positive, _Positive, _Positive] = STD
    shorter_side: _Count | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        if self.shorter_side is not None and self.shorter_side < self.image_size:
            raise ValueError("shorter_side is less than image_size")
        if self.shorter_side is None and self.augmentation.scale is None:
            raise ValueError(
                "augment.scale is null, for crops without a resize, and shorter_side is not set"
            )

    @property
    def augmentation(self) -> Augment:
        """Augmentation of training images."""
        return self.augment or Augment()

    def reader(self) -> ImageSource:
        """Return the function that reads an image file for the transforms."""
        return ImageSource(self.shorter_side, self.interpolation)

    def train(self) -> Transform:
        """Return the transform of training images: a random crop and the augmentation."""
        augment = self.augmentation
        has_resize = augment.scale is not None
        steps: list[Callable[..., Any]] = [PlainCrop(self.image_size, augment.flip)]
        if has_resize:
            mode = v2.InterpolationMode(self.interpolation)
            crop = v2.RandomResizedCrop(self.image_size, scale=augment.scale, interpolation=mode)
            steps = [crop, v2.RandomHorizontalFlip(augment.flip)]
        if augment.randaugment is not None:
            colors = v2.RandAugment(2, augment.randaugment, num_magnitude_bins=_MAX_MAGNITUDE + 1)
            if has_resize:
                steps.append(colors)
            else:
                steps += [v2.ToPILImage(), colors, v2.PILToTensor()]
        if has_resize or augment.changes_floats:
            steps += self._normalized()
        if augment.random_erasing:
            steps.append(v2.RandomErasing(augment.random_erasing))
        return _composed(steps)

    def validation(self) -> Transform:
        """Return the transform of validation images: resize and center crop."""
        size = round(self.image_size / self.crop_fraction)
        resize = v2.Resize(size, interpolation=v2.InterpolationMode(self.interpolation))
        steps = [crop_long_image, resize, v2.CenterCrop(self.image_size)]
        return _composed([*steps, *self._normalized()])

    def splits(
        self, train: SizedDataset, evaluation: SizedDataset, classes: Sequence[str], **others: Any
    ) -> Splits:
        """Return the splits of transformed images, with other attributes of `Splits`."""
        return Splits(
            train=train,
            evaluation=evaluation,
            classes=tuple(classes),
            reads_files=True,
            collate=collate_images,
            train_collate=self.augmentation.collate(len(classes)),
            prepare=self.normalize,
            **others,
        )

    def normalize(self, data: Any) -> Any:
        """Return a microbatch with images `(..., 3, H, W)` of bytes as normalized floats."""
        mean = torch.tensor(self.mean).view(3, 1, 1)
        std = torch.tensor(self.std).view(3, 1, 1)

        def normalized(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != torch.uint8:
                return tensor
            factor = (1 / (255 * std)).to(tensor.device, non_blocking=True)
            summand = (-mean / std).to(tensor.device, non_blocking=True)
            # A product of bytes and floats would make a second copy on CPUs.
            floats = tensor.to(torch.float32, memory_format=torch.contiguous_format)
            return floats.mul_(factor).add_(summand)

        return map_tensors(data, normalized)

    def _normalized(self) -> list[Callable[..., Any]]:
        return [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(self.mean), list(self.std)),
        ]


def _composed(steps: list[Callable[..., Any]]) -> Transform:
    return cast(Transform, v2.Compose([*steps, v2.ToPureTensor()]))
