"""Images and masks of the same name, in two folders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy
import torch
from PIL import Image

from samestep.errors import DataError
from samestep.recipes.images.decode import read_image
from samestep.recipes.masks.code import MaskCode, Value
from samestep.recipes.masks.files import read_mask
from samestep.recipes.masks.pairs import Pair, Unpaired, find_pairs, folders_of, train_and_evaluation
from samestep.recipes.masks.transforms import Fit, Flips, Joint, JointTransform, Variation
from samestep.recipes.splits import Splits
from samestep.recipes.task import Answer, Task
from samestep.record.overlays import areas, blended, class_map

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")


class MaskedImages:
    """Image files with their masks, read and transformed when asked for.

    A target is `(1, H, W)` of floating-point zeros and ones if masks are binary, else class numbers `(H, W)`; where
    nothing counts it is -100.
    """

    def __init__(self, pairs: Sequence[Pair], code: MaskCode, transform: Joint) -> None:
        self._pairs, self._code, self._transform = pairs, code, transform

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self._pairs[index]
        image, mask = read_image(pair.image), read_mask(pair.mask, self._code)
        if mask.shape != (image.height, image.width):
            raise DataError(
                f"{pair.mask} has {mask.shape[1]} x {mask.shape[0]} pixels, {pair.image} has "
                f"{image.width} x {image.height}",
                rule="a mask is as large as its image",
                do="mend the pair, then resume; or leave such samples out: data.bad_samples: skip",
            )
        pixels, numbers = self._transform(image, mask)
        return pixels, as_target(numbers, is_binary=self._code.is_binary)

    def foreground_of(self, index: int) -> tuple[int, int]:
        """Background and foreground pixels of a binary mask as it is in its file."""
        numbers = read_mask(self._pairs[index].mask, self._code)
        return int((numbers == 0).sum()), int((numbers == 1).sum())


def as_target(numbers: torch.Tensor, *, is_binary: bool) -> torch.Tensor:
    """Class numbers as what a loss for one output channel, or for many, compares with."""
    return numbers.to(torch.float32).unsqueeze(0) if is_binary else numbers.to(torch.int64)


def load_segmentation(
    path: str | None = None,
    *,
    images: str | None = None,
    masks: str | None = None,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    mask_suffix: str = "",
    unpaired: Unpaired = "stop",
    classes: Sequence[str] | None = None,
    mask_values: Sequence[Value] | None = None,
    ignore_values: Sequence[Value] = (),
    threshold: float | None = None,
    image_size: int | Sequence[int] = 256,
    fit: Fit = "resize",
    flips: Flips = "horizontal",
    scale: Sequence[float] = (0.5, 1.0),
    jitter: float = 0.0,
) -> Splits:
    """Images and masks; see `docs/segmentation.md` for what each option does.

    Args:
        path: a folder with the folders `images` and `masks`; or give `images` and `masks`.
        evaluation_path: another such folder to evaluate on; else a part is kept apart by a hash of names.
        classes: names of all classes with the background; none for binary masks.
        image_size: pixels of a side, or height and width, of what the model sees.

    Raises:
        DataError: a folder is missing, files have no partner, or options contradict each other.
    """
    code = MaskCode(classes, mask_values, ignore_values, threshold)
    size = _size(image_size)
    find = partial(find_pairs, endings=ENDINGS, mask_suffix=mask_suffix, unpaired=unpaired)
    train, evaluation, notes = train_and_evaluation(
        find, folders_of(path, images, masks), evaluation_path, evaluation_fraction
    )
    trained = MaskedImages(train, code, JointTransform(size, fit, Variation(flips, scale, jitter)))
    return Splits(
        train=trained,
        evaluation=MaskedImages(evaluation, code, JointTransform(size, fit)),
        classes=code.classes,
        reads_files=True,
        notes=tuple(notes),
        foreground_of=trained.foreground_of if code.is_binary else None,
    )


def segmentation_task(classes: Sequence[str], *, image_size: int | Sequence[int] = 256, fit: Fit = "resize") -> Task:
    """What a trained model makes of an image: the share of each class, and the picture with classes in colour."""
    transform = JointTransform(_size(image_size), fit)

    def read(path: Path) -> torch.Tensor:
        image = read_image(path)
        return transform(image, numpy.zeros((image.height, image.width), numpy.int16))[0]

    def tell(outputs: torch.Tensor) -> Answer:
        return {"areas": areas(class_map(outputs), classes)}

    def picture(path: Path, outputs: torch.Tensor) -> Image.Image:
        image = transform.shown(read_image(path)) if fit == "crop" else read_image(path)
        return blended(image, class_map(outputs), is_binary=len(classes) == 1)

    return Task(reads="an image file", read=read, tell=tell, picture=picture)


def _size(given: int | Sequence[int]) -> tuple[int, int]:
    sides = (given, given) if isinstance(given, int) else tuple(given)
    if len(sides) != 2 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise DataError(
            f"data.options.image_size is {given}", rule="pixels of a side, or [height, width]", do="image_size: 256"
        )
    return sides[0], sides[1]
