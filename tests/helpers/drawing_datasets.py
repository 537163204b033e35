"""Datasets that tests share: small, made on the spot, with augmentation by every generator there is."""

import random
from typing import Any

import numpy
import torch

from samestep.errors import DataError


class Draws:
    """Sample `i` is `i` and one draw from each generator."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> tuple[int, torch.Tensor]:
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand((), dtype=torch.float64))]
        return index, torch.tensor(drawn, dtype=torch.float64)


class Faulty:
    """Fails at one sample."""

    def __init__(self, size: int, bad: int, error: str) -> None:
        self._size, self._bad, self._error = size, bad, error

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> int:
        if index == self._bad and self._error == "DataError":
            raise DataError(f"sample {index} is not an image", expected="every file is an image", fix="remove it")
        if index == self._bad:
            raise ValueError(f"sample {index} is odd")
        return index


def jittered(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate that draws too: the indices of `Draws`, and its draws with one more for the microbatch."""
    more = torch.rand((), dtype=torch.float64).expand(len(samples), 1)
    return torch.tensor([index for index, _ in samples]), torch.cat([torch.stack([d for _, d in samples]), more], 1)
