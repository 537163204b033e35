"""Handwritten digits: 1,797 images of 8x8 pixels, and a small residual network.

Source: Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), test set; see
`digits.txt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from samestep.data.epoch_order import shuffled_order
from samestep.zoo.image_files import file_errors, open_image
from samestep.zoo.splits import Splits, Task, top_classes

# Rows of 64 pixels (0 to 16) and a digit.
_TABLE = Path(__file__).with_name("digits.csv.gz")
_VALIDATION = 360  # one fifth
_SPLIT_SEED = 0


class DigitImages:
    """Images as tensors `(1, 8, 8)` in 0..1, with class numbers.

    Args:
        shift: maximum random shift in pixels along each axis, for augmentation.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, shift: int = 0) -> None:
        self._images = images
        self._labels = labels
        self._shift = shift

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index]
        label = int(self._labels[index])
        return (_shifted(image, self._shift) if self._shift else image), label


def load_digits(*, shift: int = 1) -> Splits:
    """Return 1,437 training and 360 validation images, with a fixed split."""
    rows = numpy.loadtxt(_TABLE, delimiter=",")
    images = torch.tensor(rows[:, :64], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(rows[:, 64], dtype=torch.int64)
    # Not a permutation of NumPy, which other versions may draw in another way.
    order = torch.from_numpy(shuffled_order(len(images), seed=_SPLIT_SEED, epoch=0))
    validation = order[:_VALIDATION]
    train = order[_VALIDATION:]
    return Splits(
        train=DigitImages(images[train], labels[train], shift),
        evaluation=DigitImages(images[validation], labels[validation]),
        classes=tuple(str(digit) for digit in range(10)),
    )


def digits_task(classes: Sequence[str]) -> Task:
    """Return the task that classifies an image of one digit, bright on a dark background."""

    def read(path: Path) -> torch.Tensor:
        with file_errors(path, "an image"), open_image(path) as image:
            pixels = torch.from_numpy(
                # Like the data set, whose values are counts of pixels in blocks.
                numpy.array(image.convert("L").resize((8, 8), Image.Resampling.BOX))
            )
        return pixels[None].float() / 255

    return Task(
        reads="an image file of a digit",
        read=read,
        describe=lambda logits: top_classes(logits, classes, count=3),
    )


class DigitsNet(nn.Module):
    """Residual network: three blocks with batch norm, then dropout and a linear layer.

    Args:
        num_classes: number of outputs.
        width: channels of the first block; the next blocks have `2 * width` and `4 * width`.
        dropout: dropout probability before the last layer.
    """

    def __init__(self, num_classes: int = 10, width: int = 24, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            _Block(width, width, stride=1),
            _Block(width, 2 * width, stride=2),
            _Block(2 * width, 4 * width, stride=2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes)` of images `(N, 1, H, W)`."""
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
        self.shortcut = (
            nn.Identity() if is_plain else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.first_norm(self.first(features)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(features))


def _shifted(image: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the image moved by up to `shift` random pixels along each axis, filled with zeros."""
    padded = functional.pad(image, (shift, shift, shift, shift))
    top, left = (int(offset) for offset in torch.randint(0, 2 * shift + 1, (2,)))
    height, width = image.shape[-2:]
    return padded[:, top : top + height, left : left + width]
