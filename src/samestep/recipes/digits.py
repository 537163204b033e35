"""Handwritten digits: 1,797 scans of 8x8 pixels that come with scikit-learn, and a small residual net for them.

Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), test part.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional

from samestep.data.order import global_order
from samestep.errors import DataError
from samestep.recipes.splits import Splits
from samestep.recipes.task import Answer, Task

_EVALUATED = 360  # a fifth
_SPLIT_SEED = 0


class DigitImages:
    """Scans as tensors of shape `(1, 8, 8)` in 0..1, with their class numbers.

    Args:
        shift: augmentation moves a scan by up to so many pixels each way; 0 for none.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, shift: int = 0) -> None:
        self._images, self._labels, self._shift = images, labels, shift

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self._images[index], int(self._labels[index])
        return (_shifted(image, self._shift) if self._shift else image), label


def digits_task(classes: Sequence[str]) -> Task:
    """The picture of a digit in, light on dark and filling the picture; the likeliest digits out."""

    def read(path: Path) -> torch.Tensor:
        try:
            with Image.open(path) as image:
                levels = torch.from_numpy(numpy.array(image.convert("L").resize((8, 8), Image.Resampling.BOX)))
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read as an image: {error}", rule="an image file", do="another"
            ) from error
        return levels[None].float() / 255

    def tell(logits: torch.Tensor) -> Answer:
        found = logits.double().reshape(-1).softmax(dim=0).topk(3)
        pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return {"classes": [{"class": classes[number], "probability": value} for number, value in pairs]}

    return Task(reads="an image file of a digit", read=read, tell=tell)


def load_digits(*, shift: int = 1) -> Splits:
    """The scans in a fixed split of 1,437 to train on and 360 to evaluate on."""
    rows = _scans()
    images = torch.tensor(rows[:, :64], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    numbers = torch.tensor(rows[:, 64], dtype=torch.int64)
    order = torch.from_numpy(global_order(len(images), seed=_SPLIT_SEED, epoch=0, shuffle=True))
    evaluated, trained = order[:_EVALUATED], order[_EVALUATED:]
    return Splits(
        train=DigitImages(images[trained], numbers[trained], shift),
        evaluation=DigitImages(images[evaluated], numbers[evaluated]),
        classes=tuple(str(digit) for digit in range(10)),
    )


class DigitsNet(nn.Module):
    """Three residual blocks with batch norm, then dropout and a linear layer.

    Args:
        num_classes: outputs.
        width: channels of the first block; the later ones have twice and four times as many.
        dropout: probability, before the last layer.
    """

    def __init__(self, num_classes: int = 10, width: int = 24, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            _Block(width, width, stride=1),
            _Block(width, 2 * width, stride=2),
            _Block(2 * width, 4 * width, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `(N, num_classes)` of images `(N, 1, H, W)`."""
        features: torch.Tensor = self.blocks(self.stem(images)).mean(dim=(2, 3))
        logits: torch.Tensor = self.head(self.dropout(features))
        return logits


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        is_plain = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if is_plain else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first_norm(self.first(features)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(features))


def _scans() -> NDArray[numpy.float64]:
    """scikit-learn's table of 64 pixels (0 to 16) and a digit, without the seconds that importing it takes."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("scikit-learn is not installed", rule="the digits come with it", do="pip install scikit-learn")
    return numpy.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


def _shifted(image: torch.Tensor, by: int) -> torch.Tensor:
    """The image moved by a random number of pixels up to `by` in each direction, dark pixels moving in."""
    padded = functional.pad(image, (by, by, by, by))
    top, left = (int(offset) for offset in torch.randint(0, 2 * by + 1, (2,)))
    height, width = image.shape[-2:]
    return padded[:, top : top + height, left : left + width]
