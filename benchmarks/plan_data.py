"""Random images for `plan.py`."""

from __future__ import annotations

import torch

from samestep.zoo.splits import Splits

CLASSES = 10


class Images:
    """Images of random pixels, each a function of its index.

    Args:
        count: number of images.
        size: pixels of a side.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count, self._size = count, size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, self._size, self._size, generator=generator), index % CLASSES


def load(count: int = 512, size: int = 64) -> Splits:
    return Splits(train=Images(count, size), evaluation=Images(8, size), classes=tuple(map(str, range(CLASSES))))
