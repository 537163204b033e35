"""Transforms of training and validation images: crops, augmentation and normalization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch.utils.data import default_collate

from samestep.config.validation import require
from samestep.data.batch import map_tensors
from samestep.data.microbatch_dataset import Collate, SizedDataset
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.images.decoders import DecodedImage, Decoder, LazyImage, as_image, as_pixels, cropped_pixels
from samestep.zoo.images.source import ImageSource, crop_long_image, resize_pixels, resize_shorter_side
from samestep.zoo.options import call, is_count
from samestep.zoo.sample_cache import SampleCache
from samestep.zoo.splits import Splits

make_torchvision_importable()

from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

AUGMENT_KEY = "data.options.augment"
# Mean and standard deviation of ImageNet, with which torchvision's weights were trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_INTERPOLATIONS = ("bilinear", "bicubic")
_POLICIES = ("imagenet", "cifar10", "svhn")
_MAX_MAGNITUDE = 30

Transform = Callable[[Any], torch.Tensor]  # of an image from `ImageTransforms.reader()`


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images. Random numbers are a function of (seed, epoch, sample).

    Attributes:
        scale: minimum and maximum area of a random crop, as fractions of the image (Szegedy et al., "Going deeper with
            convolutions", 2015), which is resized to `image_size`; None for a random crop of `image_size` pixels
            without a resize, from images whose shorter side has a fixed length (Krizhevsky et al., "ImageNet
            classification with deep convolutional neural networks", 2012).
        flip: probability of a horizontal flip.
        auto_augment: AutoAugment policy `imagenet`, `cifar10` or `svhn` (Cubuk et al., 2019), or None.
        randaugment: magnitude of RandAugment, 0 to 30 (Cubuk et al., 2020), or None.
        randaugment_ops: number of operations of RandAugment.
        color_jitter: strength for brightness, contrast and saturation, or four numbers with the hue (at most 0.5) last.
        random_erasing: probability of random erasing (Zhong et al., 2020).
        mixup_alpha: parameter of the Beta distribution of mixup (Zhang et al., "mixup", 2018); 0 for none. Images and
            targets are mixed within a microbatch.
        cutmix_alpha: the same for CutMix (Yun et al., "CutMix", 2019). With both, one is drawn for each microbatch.
    """

    scale: tuple[float, float] | None = (0.08, 1.0)
    flip: float = 0.5
    auto_augment: str | None = None
    randaugment: int | None = None
    randaugment_ops: int = 2
    color_jitter: float | tuple[float, ...] = 0.0
    random_erasing: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __post_init__(self) -> None:
        scale, jitter, magnitude, policy = self.scale, self._jitter, self.randaugment, self.auto_augment
        operations, probability, at_least_0 = self.randaugment_ops, "a probability, 0 to 1", "a number, at least 0"
        is_pair = isinstance(scale, list | tuple) and len(scale) == 2 and all(map(_is_number, scale))
        is_ordered = scale is not None and is_pair and 0 < scale[0] <= scale[1] <= 1
        is_jitter = len(jitter) == 4 and all(map(_is_number, jitter)) and jitter[3] <= 0.5
        jitter_rule = "one number for brightness, contrast and saturation; or four numbers, the fourth for the hue"
        is_magnitude = isinstance(magnitude, int) and _is_number(magnitude, _MAX_MAGNITUDE)
        checks = {
            "scale": (scale is None or is_ordered, "two numbers, 0 < first <= second <= 1, or null", "[0.08, 1.0]"),
            "flip": (_is_number(self.flip, 1), probability, "0.25"),
            "random_erasing": (_is_number(self.random_erasing, 1), probability, "0.25"),
            "mixup_alpha": (_is_number(self.mixup_alpha), at_least_0, "0.2"),
            "cutmix_alpha": (_is_number(self.cutmix_alpha), at_least_0, "0.2"),
            "color_jitter": (is_jitter, f"{jitter_rule}, at most 0.5", "0.4, or [0.4, 0.4, 0.4, 0.1]"),
            "randaugment": (magnitude is None or is_magnitude, f"a magnitude, 0 to {_MAX_MAGNITUDE}, or null", "9"),
            "randaugment_ops": (is_count(operations), "at least 1", "2"),
            "auto_augment": (policy in (None, *_POLICIES), f"one of {', '.join(_POLICIES)}, or null", "imagenet"),
        }
        _require_fields(self, AUGMENT_KEY, checks)
        require(
            policy is None or magnitude is None,
            f"{AUGMENT_KEY} has both auto_augment and randaugment",
            "at most one of the two policies",
            f"remove {AUGMENT_KEY}.auto_augment or {AUGMENT_KEY}.randaugment",
        )

    @property
    def _jitter(self) -> list[Any]:
        """Brightness, contrast, saturation and hue."""
        jitter: Any = self.color_jitter
        return list(jitter) if isinstance(jitter, list | tuple) else [jitter, jitter, jitter, 0.0]

    @property
    def changes_floats(self) -> bool:
        """Whether normalized images are changed: erased, or mixed in a microbatch."""
        return bool(self.random_erasing or self.mixup_alpha or self.cutmix_alpha)

    def color_transforms(self) -> list[Callable[..., Any]]:
        """Return the transforms of an image of Pillow after its crop and flip."""
        transforms: list[Callable[..., Any]] = []
        if self.auto_augment is not None:
            transforms.append(v2.AutoAugment(v2.AutoAugmentPolicy(self.auto_augment)))
        if self.randaugment is not None:
            bins = _MAX_MAGNITUDE + 1
            transforms.append(v2.RandAugment(self.randaugment_ops, self.randaugment, num_magnitude_bins=bins))
        if any(self._jitter):
            transforms.append(v2.ColorJitter(*self._jitter))
        return transforms

    def collate(self, classes: int) -> Collate | None:
        """Return a collate function for mixup and CutMix, or None if both are off."""
        mixes = []
        if self.mixup_alpha:
            mixes.append(v2.MixUp(alpha=float(self.mixup_alpha), num_classes=classes))
        if self.cutmix_alpha:
            mixes.append(v2.CutMix(alpha=float(self.cutmix_alpha), num_classes=classes))
        if not mixes:
            return None
        mix = mixes[0] if len(mixes) == 1 else v2.RandomChoice(mixes)

        def mixed(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
            images, labels = mix(*default_collate(samples))
            return images, labels

        return mixed


def collate_images(samples: list[Any]) -> Any:
    """Return a batch as torch's default; images of bytes keep the order in memory that they have.

    torch would move the channels of each image, in half of the time of a crop from a cache; the device does so faster.
    """
    images, labels = zip(*samples, strict=True)
    if images[0].dtype != torch.uint8:
        return default_collate(samples)
    pixels = default_collate([image.permute(1, 2, 0) for image in images])
    return pixels.permute(0, 3, 1, 2), default_collate(list(labels))


def parse_augment(options: Mapping[str, Any] | None) -> Augment:
    """Return the augmentation of `data.options.augment`.

    Raises:
        RecipeError: an option is unknown or has an invalid value.
    """
    require(
        options is None or isinstance(options, Mapping),
        f"{AUGMENT_KEY} is {options!r}",
        "a mapping of options to values, or null",
        f"--set {AUGMENT_KEY}.random_erasing=0.25",
    )
    augment: Augment = call(Augment, options or {}, where=AUGMENT_KEY)
    return augment


class RandomCrop(v2.RandomResizedCrop):  # type: ignore[misc]
    """Random crop of an `EncodedImage` to `(3, size, size)` bytes, with the random numbers of the base class."""

    def forward(self, image: LazyImage) -> torch.Tensor:
        """Return the resized crop."""
        box = self.make_params([torch.empty(3, image.height, image.width, device="meta")])
        height, width = self.size
        pixels = cropped_pixels(image, (box["top"], box["left"], box["height"], box["width"]), height, width)
        return resize_pixels(pixels, height, width, self.interpolation)


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


@dataclass(frozen=True)
class ImageTransforms:
    """Decoding, resizing, cropping and normalization of images.

    The decoder `pillow` gives images of Pillow, and normalized floats. The decoder `simplejpeg` decodes JPEG files at a
    reduced scale if the crop is large, resizes bytes with torch, and gives bytes: `normalize` converts batches on the
    device. Random erasing, mixup and CutMix change normalized floats; with them the training images are floats too.

    Attributes:
        image_size: height and width in pixels.
        crop_fraction: validation images are resized to a shorter side of `image_size / crop_fraction` and
            center-cropped.
        interpolation: `bilinear` or `bicubic`.
        mean: mean of each channel, for values in 0..1.
        std: standard deviation of each channel.
        decoder: `pillow` or `simplejpeg`.
        shorter_side: length to which the shorter side of an image is resized before all transforms, or None.
    """

    image_size: int
    crop_fraction: float
    interpolation: str
    mean: Sequence[float]
    std: Sequence[float]
    decoder: Decoder = "pillow"
    shorter_side: int | None = None

    def __post_init__(self) -> None:
        size, fraction, mean, std = self.image_size, self.crop_fraction, self.mean, self.std
        is_fraction = _is_number(fraction, largest=1) and fraction > 0
        is_interpolation = self.interpolation in _INTERPOLATIONS
        is_std = _is_triple(std) and all(number > 0 for number in std)
        side = self.shorter_side
        is_side = side is None or (is_count(size) and is_count(side, size))
        triple, decoders = "three finite numbers, for red, green and blue", get_args(Decoder)
        checks = {
            "image_size": (is_count(size), "a number of pixels", "224"),
            "crop_fraction": (is_fraction, "0 < crop_fraction <= 1", "0.875"),
            "interpolation": (is_interpolation, f"one of {', '.join(_INTERPOLATIONS)}", "bilinear"),
            "mean": (_is_triple(mean), triple, "[0.5, 0.5, 0.5]"),
            "std": (is_std, f"{triple}, above 0", "[0.5, 0.5, 0.5]"),
            "decoder": (self.decoder in decoders, f"one of {', '.join(decoders)}", "pillow"),
            "shorter_side": (is_side, "a number of pixels, at least image_size, or null", size),
        }
        _require_fields(self, "data.options", checks)

    def reader(self) -> ImageSource:
        """Return the function that reads an image file for the transforms.

        Raises:
            RecipeError: the library of the decoder is not installed.
        """
        return ImageSource(self.decoder, self.shorter_side, self.interpolation)

    def train(self, augment: Augment) -> Transform:
        """Return the transform of training images: a random crop and `augment`."""
        interpolation = v2.InterpolationMode(self.interpolation)
        is_pillow, colors = self.decoder == "pillow" and augment.scale is not None, augment.color_transforms()
        if augment.scale is None:
            require(
                self.shorter_side is not None,
                f"{AUGMENT_KEY}.scale is null and data.options.shorter_side is not set",
                "shorter_side, at least image_size, for crops without a resize",
                f"--set data.options.shorter_side={round(self.image_size / self.crop_fraction)}",
            )
            steps: list[Callable[..., Any]] = [PlainCrop(self.image_size, augment.flip)]
        else:
            crop_class = v2.RandomResizedCrop if is_pillow else RandomCrop
            crop = crop_class(self.image_size, scale=tuple(augment.scale), interpolation=interpolation)
            flip = (v2.RandomHorizontalFlip if is_pillow else RandomFlip)(augment.flip)
            steps = [as_image, crop, flip] if is_pillow else [crop, flip]
        if colors and not is_pillow:  # they change images of Pillow, for equal results with each decoder
            colors = [v2.ToPILImage(), *colors, v2.PILToTensor()]
        steps += colors
        if is_pillow or augment.changes_floats:
            steps += self._normalized()
        if augment.random_erasing:
            steps.append(v2.RandomErasing(augment.random_erasing))
        return _composed(steps)

    def validation(self) -> Transform:
        """Return the transform of validation images: resize and center crop."""
        size, interpolation = round(self.image_size / self.crop_fraction), v2.InterpolationMode(self.interpolation)
        if self.decoder != "pillow":
            return CenterCrop(self.image_size, size, interpolation)
        resize = v2.Resize(size, interpolation=interpolation)
        return _composed([as_image, crop_long_image, resize, v2.CenterCrop(self.image_size), *self._normalized()])

    def splits(
        self,
        train: SizedDataset,
        evaluation: SizedDataset,
        classes: Sequence[str],
        augment: Augment,
        open_cache: Callable[..., tuple[SampleCache, str]] | None = None,
        fingerprint: str = "",
    ) -> Splits:
        """Return the splits of transformed images."""
        return Splits(
            train=train,
            evaluation=evaluation,
            classes=tuple(classes),
            reads_files=True,
            collate=collate_images,
            train_collate=augment.collate(len(classes)),
            prepare=self.normalize,
            open_cache=open_cache,
            fingerprint=fingerprint,
        )

    def normalize(self, data: Any) -> Any:
        """Return the data of a microbatch with images `(..., 3, H, W)` of bytes as normalized floats."""
        mean, std = torch.tensor(self.mean).view(3, 1, 1), torch.tensor(self.std).view(3, 1, 1)

        def normalized(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != torch.uint8:
                return tensor
            factor, summand = (t.to(tensor.device, non_blocking=True) for t in (1 / (255 * std), -mean / std))
            # A product of bytes and floats would make a second copy on CPUs.
            return tensor.to(torch.float32, memory_format=torch.contiguous_format).mul_(factor).add_(summand)

        return map_tensors(data, normalized)

    def _normalized(self) -> list[Callable[..., Any]]:
        return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(self.mean), list(self.std))]


def _composed(steps: list[Callable[..., Any]]) -> Transform:
    return cast(Transform, v2.Compose([*steps, v2.ToPureTensor()]))


def _require_fields(config: object, prefix: str, checks: Mapping[str, tuple[bool, str, object]]) -> None:
    """Raise an error unless each field is valid; a check has the validity, the rule and an example."""
    for name, (is_valid, expected, example) in checks.items():
        key = f"{prefix}.{name}"
        require(is_valid, f"{key} is {getattr(config, name)!r}", expected, f"set {key}: {example}")


def _is_number(value: Any, largest: float = math.inf) -> bool:
    return _is_finite(value) and 0 <= value <= largest


def _is_triple(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_finite, value))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
