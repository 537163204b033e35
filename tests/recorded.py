"""Data, model and losses that recipes of tests name by import path.

Targets are the samples' own indices, and `loss` writes down those it sees, one line a shard, in a file a process.
While there is a file `hold` with `RANK CALL` in it, that rank waits in that call of the loss.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from samestep import Loss, cross_entropy
from samestep.errors import DataError
from samestep.recipes.splits import Splits

CLASSES = 5
FIRST_EPOCH = 13 * 4  # calls of one process that has all the shards
_calls: list[torch.Tensor] = []
_evaluated: list[torch.Tensor] = []


class Indexed:
    """Random images with noise for augmentation; the target is the index."""

    def __init__(self, samples: int) -> None:
        self._images = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index] + 0.1 * torch.randn(1, 6, 6), index


def load(*, samples: int = 102) -> Splits:
    """Samples to train on, and a few of the same to evaluate on."""
    return Splits(
        train=Indexed(samples), evaluation=Indexed(30), classes=tuple(f"class {number}" for number in range(CLASSES))
    )


class Broken(Indexed):
    """One of its samples cannot be made."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40:
            raise KeyError("no such colour")
        return super().__getitem__(index)


def load_broken() -> Splits:
    """As `load`, with a sample that cannot be made."""
    return Splits(train=Broken(102), evaluation=Indexed(30), classes=load().classes)


class Unreadable(Indexed):
    """One of its samples is refused."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40:
            raise DataError("sample 40 cannot be read", rule="samples can be read", do="mend it")
        return super().__getitem__(index)


def load_unreadable() -> Splits:
    """As `load`, with a sample that is refused."""
    return Splits(train=Unreadable(102), evaluation=Indexed(30), classes=load().classes)


class Net(nn.Sequential):
    """Convolution, batch norm, dropout: what the number of processes could change if it had a way to."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
        )


class Pooled(nn.Sequential):
    """The smallest net that takes colour images of any size."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1)
        )
        self.append(nn.Linear(16, num_classes))


def loss(outputs: torch.Tensor, indices: torch.Tensor) -> Loss:
    """Cross entropy against classes that follow from the indices; training calls are written down."""
    if outputs.requires_grad:
        _write_down(indices)
        _hold()
    return cross_entropy(outputs, indices % CLASSES)


def plain(outputs: torch.Tensor, classes: torch.Tensor) -> Loss:
    """Cross entropy against targets that are classes; it writes down and waits as `loss` does."""
    if outputs.requires_grad:
        _write_down(classes)
        _hold()
    return cross_entropy(outputs, classes)


def failing(outputs: torch.Tensor, indices: torch.Tensor, *, rank: int, call: int) -> Loss:
    """As `loss`, but it raises in one call of one rank."""
    value = loss(outputs, indices)
    if outputs.requires_grad and dist.get_rank() == rank and len(_calls) == call:
        raise ArithmeticError("the sum does not add up")
    return value


def infinite_in_evaluation(outputs: torch.Tensor, indices: torch.Tensor) -> Loss:
    """As `loss`, but infinite where nothing is trained."""
    value = loss(outputs, indices)
    return value if outputs.requires_grad else Loss(value.sum * float("inf"), value.count)


def held_in_evaluation(outputs: torch.Tensor, indices: torch.Tensor) -> Loss:
    """As `loss`, but it tells of calls in evaluation too, and waits in the second of a process while there is
    `hold-evaluation`.
    """
    value = loss(outputs, indices)
    if not outputs.requires_grad:
        _evaluated.append(indices)
        with Path(f"evaluated-{dist.get_rank()}-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write("\n")
        while len(_evaluated) == 2 and Path("hold-evaluation").exists():
            time.sleep(0.01)
    return value


def not_finite_for(outputs: torch.Tensor, indices: torch.Tensor, *, sample: int) -> Loss:
    """As `loss`, but infinite for the shard that has a certain sample."""
    value = loss(outputs, indices)
    is_hit = bool((indices == sample).any()) and outputs.requires_grad
    return Loss(value.sum * float("inf"), value.count) if is_hit else value


def undefined_at_first(outputs: torch.Tensor, indices: torch.Tensor) -> Loss:
    """As `loss`, but not a number in the first evaluation."""
    value = loss(outputs, indices)
    is_first = len(_calls) <= FIRST_EPOCH and not outputs.requires_grad
    return Loss(value.sum * float("nan"), value.count) if is_first else value


def not_a_splits() -> int:
    """A data function that returns something else."""
    return 3


def seen_by(process: Path) -> tuple[int, list[list[int]]]:
    """The rank and the lines of one file that `loss` wrote."""
    lines = process.read_text(encoding="utf-8").splitlines()
    return int(process.name.split("-")[1]), [[int(index) for index in line.split()] for line in lines]


def _write_down(indices: torch.Tensor) -> None:
    _calls.append(indices)
    with Path(f"seen-{dist.get_rank()}-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, indices.tolist())) + "\n")


def _hold() -> None:
    while _held() == (dist.get_rank(), len(_calls)):
        time.sleep(0.01)


def _held() -> tuple[int, int]:
    try:
        rank, call = Path("hold").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return -1, -1
    return int(rank), int(call)
