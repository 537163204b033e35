"""Data, model and losses of test recipes.

The target of a sample is its index. `loss` records the indices of every training batch in the file
`seen-RANK-PROCESS`, one line per batch. A file `hold` with the text `RANK CALL` blocks this call of the loss on
this rank until the file is removed.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from samestep.errors import DataError
from samestep.zoo.losses import cross_entropy
from samestep.zoo.splits import Splits

CLASSES = 5
FIRST_EPOCH = 13  # calls of a process
_calls: list[torch.Tensor] = []
_evaluated: list[torch.Tensor] = []


class Indexed:
    """Random images with noise as augmentation; the target is the index."""

    def __init__(self, samples: int) -> None:
        self._images = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index] + 0.1 * torch.randn(1, 6, 6), index


def load(*, samples: int = 102) -> Splits:
    """Training data, and the first samples of the same data for evaluation."""
    return Splits(
        train=Indexed(samples), evaluation=Indexed(30), classes=tuple(f"class {number}" for number in range(CLASSES))
    )


class Broken(Indexed):
    """Raises KeyError for one sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40:
            raise KeyError("no such colour")
        return super().__getitem__(index)


def load_broken() -> Splits:
    """Same as `load`, with a sample that raises KeyError."""
    return Splits(train=Broken(102), evaluation=Indexed(30), classes=load().classes)


class Unreadable(Indexed):
    """Raises DataError for one sample."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 40:
            raise DataError("sample 40 cannot be read", expected="samples can be read", fix="replace the sample")
        return super().__getitem__(index)


def load_unreadable() -> Splits:
    """Same as `load`, with a sample that raises DataError."""
    return Splits(train=Unreadable(102), evaluation=Indexed(30), classes=load().classes)


class Net(nn.Sequential):
    """Convolution, batch norm and dropout: layers that could depend on the number of processes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
        )


class Pooled(nn.Sequential):
    """Small network for color images of any size."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1)
        )
        self.append(nn.Linear(16, num_classes))


def loss(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Cross entropy against classes computed from the indices; training calls are recorded."""
    if outputs.requires_grad:
        _record(indices)
        _wait_while_blocked()
    return cross_entropy(outputs, indices % CLASSES)


def plain(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Same as `loss`, with classes as targets."""
    if outputs.requires_grad:
        _record(classes)
        _wait_while_blocked()
    return cross_entropy(outputs, classes)


def failing(outputs: torch.Tensor, indices: torch.Tensor, *, rank: int, call: int) -> torch.Tensor:
    """Same as `loss`, but one call on one rank raises an error."""
    value = loss(outputs, indices)
    if outputs.requires_grad and dist.get_rank() == rank and len(_calls) == call:
        raise ArithmeticError("the sum does not add up")
    return value


def infinite_in_evaluation(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Same as `loss`, but infinite in evaluation."""
    value = loss(outputs, indices)
    return value if outputs.requires_grad else value * float("inf")


def blocking_in_evaluation(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Same as `loss`, but evaluation calls are recorded and can block.

    They are recorded in `evaluated-RANK-PROCESS`; the second one of a process blocks while a file `hold-evaluation`
    exists.
    """
    value = loss(outputs, indices)
    if not outputs.requires_grad:
        _evaluated.append(indices)
        with Path(f"evaluated-{dist.get_rank()}-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write("\n")
        while len(_evaluated) == 2 and Path("hold-evaluation").exists():
            time.sleep(0.01)
    return value


def infinite_for_sample(outputs: torch.Tensor, indices: torch.Tensor, *, sample: int) -> torch.Tensor:
    """Same as `loss`, but infinite for the batch with this sample."""
    value = loss(outputs, indices)
    is_hit = bool((indices == sample).any()) and outputs.requires_grad
    return value * float("inf") if is_hit else value


def infinite_from_call(outputs: torch.Tensor, indices: torch.Tensor, *, call: int) -> torch.Tensor:
    """Same as `loss`, but infinite from this training call of a process on."""
    value = loss(outputs, indices)
    return value * float("inf") if outputs.requires_grad and len(_calls) >= call else value


def nan_in_evaluation(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Cross entropy, but NaN in evaluation."""
    value = cross_entropy(outputs, classes)
    return value if outputs.requires_grad else value * float("nan")


def nan_in_first_evaluation(outputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Same as `loss`, but NaN in the first evaluation."""
    value = loss(outputs, indices)
    is_first = len(_calls) <= FIRST_EPOCH and not outputs.requires_grad
    return value * float("nan") if is_first else value


def not_a_splits() -> int:
    """Data function with an invalid result."""
    return 3


def read_calls(path: Path) -> tuple[int, list[list[int]]]:
    """Return the rank and the recorded calls of one process."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return int(path.name.split("-")[1]), [[int(index) for index in line.split()] for line in lines]


def count_calls(folder: Path, rank: int = 0) -> int:
    """Return the number of training calls of the loss that a rank has started, in all runs of a folder."""
    return sum(len(read_calls(path)[1]) for path in folder.glob(f"seen-{rank}-*"))


def _record(indices: torch.Tensor) -> None:
    _calls.append(indices)
    with Path(f"seen-{dist.get_rank()}-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, indices.tolist())) + "\n")


def _wait_while_blocked() -> None:
    while _blocked_call() == (dist.get_rank(), len(_calls)):
        time.sleep(0.01)


def _blocked_call() -> tuple[int, int]:
    try:
        rank, call = Path("hold").read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return -1, -1
    return int(rank), int(call)
