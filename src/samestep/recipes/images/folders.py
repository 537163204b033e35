"""Images in one folder a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from samestep.errors import DataError
from samestep.recipes.images.augment import augment_of
from samestep.recipes.images.decode import read_image
from samestep.recipes.images.view import MEAN, STD, Transform, View
from samestep.recipes.kept_apart import kept_apart
from samestep.recipes.splits import Splits
from samestep.recipes.task import Answer, Task

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_TOLD = 5  # classes that a prediction names

Sample = tuple[Path, int]


class ImageFiles:
    """Image files with class numbers, read and transformed when asked for."""

    def __init__(self, samples: list[Sample], transform: Transform) -> None:
        self._samples, self._transform = samples, transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        return self._transform(read_image(path)), label


def load_images(
    path: str,
    *,
    evaluation_path: str | None = None,
    evaluation_fraction: float = 0.2,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
    augment: Mapping[str, Any] | None = None,
) -> Splits:
    """Images of any size below one folder a class.

    Args:
        path: the folder of class folders.
        evaluation_path: another such folder to evaluate on; else a part of `path` is kept apart.
        evaluation_fraction: how much of each class is kept apart, by a hash of file names, so the split stays the
            same when files are added.
        image_size: pixels of the square that the model sees; this and the next four as in `View`.
        augment: options of `Augment`; None for a random crop and flip.

    Raises:
        InputError: a folder is missing, has no classes, or a class has no images; an option cannot be.
    """
    view = View(image_size=image_size, crop_fraction=crop_fraction, interpolation=interpolation, mean=mean, std=std)
    wanted = augment_of(augment)
    classes, samples = _scan(Path(path))
    if evaluation_path is None:
        names = [file.relative_to(path).as_posix() for file, _ in samples]
        parts = kept_apart(names, [label for _, label in samples], classes, evaluation_fraction)
        train, evaluation = ([samples[place] for place in places] for places in parts)
    else:
        others, evaluation = _scan(Path(evaluation_path))
        train = samples
        if others != classes:
            raise DataError(
                f"{evaluation_path} has the classes {', '.join(others)}, {path} has {', '.join(classes)}",
                rule="both folders have the same classes",
                do="look at the folders' names",
            )
    return Splits(
        train=ImageFiles(train, view.training(wanted)),
        evaluation=ImageFiles(evaluation, view.evaluating()),
        classes=tuple(classes),
        reads_files=True,
        train_collate=wanted.mixing(len(classes)),
    )


def image_task(
    classes: Sequence[str],
    *,
    image_size: int = 224,
    crop_fraction: float = 0.875,
    interpolation: str = "bilinear",
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Task:
    """An image file in, the likeliest classes out; the other options of the data say nothing about one image."""
    view = View(image_size=image_size, crop_fraction=crop_fraction, interpolation=interpolation, mean=mean, std=std)
    transform = view.evaluating()

    def tell(logits: torch.Tensor) -> Answer:
        probabilities = logits.detach().double().reshape(-1).softmax(dim=0)
        found = probabilities.topk(min(_TOLD, len(classes)))
        pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return {"classes": [{"class": classes[number], "probability": value} for number, value in pairs]}

    return Task(reads="an image file", read=lambda path: transform(read_image(path)), tell=tell)


def _scan(root: Path) -> tuple[list[str], list[Sample]]:
    if not root.is_dir():
        raise DataError(
            f"there is no folder {root}", rule="data.options.path is a folder of class folders", do="look at the path"
        )
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"{root} has {len(classes)} folders", rule="at least two, one a class", do=f"{root}/CLASS/IMAGE.jpg"
        )
    samples: list[Sample] = []
    for number, name in enumerate(classes):
        found = sorted(file for file in (root / name).rglob("*") if file.suffix.lower() in _ENDINGS)
        if not found:
            raise DataError(
                f"class {name!r} has no images in {root / name}",
                rule=f"every class has files that end in {', '.join(_ENDINGS)}",
                do="remove the folder, or put images there",
            )
        samples += [(file, number) for file in found]
    return classes, samples
