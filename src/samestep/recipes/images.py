"""Images in one folder a class."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError

from samestep.errors import DataError
from samestep.recipes.splits import Splits
from samestep.runtime.vision import make_torchvision_importable

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
# Mean and standard deviation of ImageNet's pixels, which torchvision's weights were trained with.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Sample = tuple[Path, int]
Transform = Callable[[Image.Image], torch.Tensor]


class ImageFiles:
    """Image files with class numbers, read and transformed when asked for."""

    def __init__(self, samples: list[Sample], transform: Transform) -> None:
        self._samples, self._transform = samples, transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._samples[index]
        return self._transform(_read(path)), label


def load_images(
    path: str, *, evaluation_path: str | None = None, evaluation_fraction: float = 0.2, image_size: int = 224
) -> Splits:
    """Images of any size below one folder a class.

    Training takes a random crop of 8 to 100 % of the area and flips half of them (Szegedy et al., "Going deeper
    with convolutions", 2015); evaluation takes the centre.

    Args:
        path: the folder of class folders.
        evaluation_path: another such folder to evaluate on; else a part of `path` is kept apart.
        evaluation_fraction: how much of each class is kept apart, by a hash of file names, so the split stays the
            same when files are added.
        image_size: pixels of the square that the model sees.

    Raises:
        DataError: a folder is missing, has no classes, or a class has no images.
    """
    if not 0 < evaluation_fraction < 1:
        raise DataError(
            f"data.options.evaluation_fraction is {evaluation_fraction}", rule="between 0 and 1", do="0.2 is usual"
        )
    classes, samples = _scan(Path(path))
    if evaluation_path is None:
        train, evaluation = _split(Path(path), samples, evaluation_fraction)
    else:
        others, evaluation = _scan(Path(evaluation_path))
        train = samples
        if others != classes:
            raise DataError(
                f"{evaluation_path} has the classes {', '.join(others)}, {path} has {', '.join(classes)}",
                rule="both folders have the same classes",
                do="look at the folders' names",
            )
    training, evaluating = _transforms(image_size)
    return Splits(
        train=ImageFiles(train, training),
        evaluation=ImageFiles(evaluation, evaluating),
        classes=tuple(classes),
        reads_files=True,
    )


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


def _split(root: Path, samples: list[Sample], fraction: float) -> tuple[list[Sample], list[Sample]]:
    """Keep the files apart whose names hash to less than `fraction`, and at least one of each class on each side."""
    train: list[Sample] = []
    evaluation: list[Sample] = []
    for number in sorted({label for _, label in samples}):
        own = sorted((sample for sample in samples if sample[1] == number), key=lambda sample: _place(root, sample))
        if len(own) < 2:
            raise DataError(
                f"class {own[0][0].parent.name!r} has one image",
                rule="one to train on and one to evaluate on",
                do="add images, or give data.options.evaluation_path",
            )
        apart = sum(_place(root, sample) < fraction for sample in own)
        apart = min(len(own) - 1, max(1, apart))
        evaluation += own[:apart]
        train += own[apart:]
    return sorted(train), sorted(evaluation)


def _place(root: Path, sample: Sample) -> float:
    """A number in 0..1 that only the file's name decides, so that files added later move no other."""
    digest = hashlib.sha256(sample[0].relative_to(root).as_posix().encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as an image: {error}",
            rule="every file of a class folder is a whole image",
            do="remove or replace the file, then resume",
        ) from error


def _transforms(size: int) -> tuple[Transform, Transform]:
    make_torchvision_importable()
    from torchvision.transforms import v2

    to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
    training = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *to_tensor])
    evaluating = v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), *to_tensor])
    return training, evaluating
