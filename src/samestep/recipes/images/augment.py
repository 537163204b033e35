"""What training does to images besides cutting them to size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from samestep.config.check import require
from samestep.data.samples import Collate
from samestep.recipes.names import call
from samestep.runtime.vision import make_torchvision_importable

WHERE = "data.options.augment"
_POLICIES = ("imagenet", "cifar10", "svhn")
_MOST_MAGNITUDE = 30
_PARTS = 4  # brightness, contrast, saturation, hue


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How training images vary; the random numbers of each are a function of (seed, epoch, sample).

    Attributes:
        scale: the part of the area that a random crop takes, from and to (Szegedy et al., "Going deeper with
            convolutions", 2015).
        flip: probability of a mirrored image.
        auto_augment: a learned policy, `imagenet`, `cifar10` or `svhn` (Cubuk et al., 2019); None for none.
        randaugment: magnitude 0 to 30 of RandAugment (Cubuk et al., 2020); None for none.
        randaugment_ops: changes in a row that RandAugment makes.
        color_jitter: how far brightness, contrast and saturation vary, one number; or four numbers, the fourth for the
            hue (at most 0.5).
        random_erasing: probability that a rectangle is blanked out (Zhong et al., 2020).
        mixup_alpha: of the Beta distribution by which pairs of a shard's images and targets are mixed (Zhang et al.,
            "mixup", 2018); 0 for not at all.
        cutmix_alpha: the same for rectangles cut from one image into another (Yun et al., "CutMix", 2019). With both,
            each shard takes one of them by chance.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    auto_augment: str | None = None
    randaugment: int | None = None
    randaugment_ops: int = 2
    color_jitter: float | tuple[float, ...] = 0.0
    random_erasing: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __post_init__(self) -> None:
        scale, jitters = self.scale, self._jitters
        require(
            isinstance(scale, list | tuple)
            and len(scale) == 2
            and all(map(_is_number, scale))
            and 0 < scale[0] <= scale[1] <= 1,
            f"{WHERE}.scale is {scale}",
            "two numbers, 0 < first <= second <= 1",
            f"set {WHERE}.scale: [0.08, 1.0]",
        )
        for name in ("flip", "random_erasing"):
            value = getattr(self, name)
            require(
                _is_number(value) and 0 <= value <= 1,
                f"{WHERE}.{name} is {value!r}",
                "a probability, 0 to 1",
                f"set {WHERE}.{name}: 0.25",
            )
        for name in ("mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            require(
                _is_number(value) and value >= 0,
                f"{WHERE}.{name} is {value!r}",
                "a number, at least 0",
                f"set {WHERE}.{name}: 0.2",
            )
        require(
            all(_is_number(part) and part >= 0 for part in jitters) and len(jitters) == _PARTS and jitters[3] <= 0.5,
            f"{WHERE}.color_jitter is {self.color_jitter!r}",
            "one number for brightness, contrast and saturation; or four, the fourth for the hue, at most 0.5",
            f"set {WHERE}.color_jitter: 0.4, or [0.4, 0.4, 0.4, 0.1]",
        )
        self._require_policies()

    def _require_policies(self) -> None:
        magnitude, policy, changes = self.randaugment, self.auto_augment, self.randaugment_ops
        require(
            magnitude is None or (_is_whole(magnitude) and 0 <= magnitude <= _MOST_MAGNITUDE),
            f"{WHERE}.randaugment is {magnitude!r}",
            f"a magnitude, 0 to {_MOST_MAGNITUDE}, or null",
            f"set {WHERE}.randaugment: 9",
        )
        require(
            _is_whole(changes) and changes >= 1,
            f"{WHERE}.randaugment_ops is {changes!r}",
            "at least 1",
            f"set {WHERE}.randaugment_ops: 2",
        )
        require(
            policy is None or policy in _POLICIES,
            f"{WHERE}.auto_augment is {policy!r}",
            f"one of {', '.join(_POLICIES)}, or null",
            f"set {WHERE}.auto_augment: imagenet",
        )
        require(
            policy is None or magnitude is None,
            f"{WHERE} has both auto_augment and randaugment",
            "at most one of them: each is a whole policy",
            "remove one of them",
        )

    @property
    def _jitters(self) -> list[Any]:
        """Brightness, contrast, saturation and hue."""
        given: Any = self.color_jitter
        return list(given) if isinstance(given, list | tuple) else [given, given, given, 0.0]

    def of_images(self) -> list[Callable[..., Any]]:
        """Transforms of an image with values from 0 to 255, in the order in which they are made."""
        v2 = _v2()
        transforms: list[Callable[..., Any]] = [v2.RandomHorizontalFlip(self.flip)]
        if self.auto_augment is not None:
            transforms.append(v2.AutoAugment(v2.AutoAugmentPolicy(self.auto_augment)))
        if self.randaugment is not None:
            bins = _MOST_MAGNITUDE + 1
            transforms.append(v2.RandAugment(self.randaugment_ops, self.randaugment, num_magnitude_bins=bins))
        if any(self._jitters):
            transforms.append(v2.ColorJitter(*self._jitters))
        return transforms

    def of_tensors(self) -> list[Callable[..., Any]]:
        """Transforms of a normalised image."""
        return [_v2().RandomErasing(self.random_erasing)] if self.random_erasing else []

    def mixing(self, classes: int) -> Collate | None:
        """A collate function that mixes the samples of a shard, if that is wanted."""
        v2 = _v2()
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


def augment_of(options: Mapping[str, Any] | None) -> Augment:
    """What `data.options.augment` says.

    Raises:
        RecipeError: a key is not known, or a value cannot be.
    """
    require(
        options is None or isinstance(options, Mapping),
        f"{WHERE} is {options!r}",
        "a mapping of options to values, or null",
        f"--set {WHERE}.random_erasing=0.25",
    )
    augment: Augment = call(Augment, options or {}, where=WHERE)
    return augment


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _v2() -> Any:
    make_torchvision_importable()
    from torchvision.transforms import v2

    return v2
