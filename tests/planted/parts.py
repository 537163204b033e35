"""Shared code of the scripts in this folder: data, models and a plain loop."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional

import samestep
from samestep.view.view import View
from samestep.zoo.splits import Splits

SAMPLES, FEATURES, CLASSES, BATCH = 117, 12, 4, 32
Sample = tuple[torch.Tensor, torch.Tensor]
View.divides_small_calls = True


class Points:
    """Labelled points; augmentation adds noise from torch's global generator."""

    def __init__(self, samples: int = SAMPLES, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.targets = self.inputs[:, :CLASSES].argmax(dim=1)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        return self.inputs[index] + self.noise * torch.randn(FEATURES), self.targets[index]


def load(*, samples: int = SAMPLES) -> Splits:
    """Return the dataset of a recipe."""
    return Splits(train=Points(samples), evaluation=Points(31, noise=0.0), classes=tuple(map(str, range(CLASSES))))


def seeded(model: type[nn.Module], *arguments: object) -> nn.Module:
    """Return a model with constant initial weights."""
    torch.manual_seed(0)
    return model(*arguments)


class Net(nn.Sequential):
    """Model with batch norm and dropout."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), *extra, nn.Linear(16, CLASSES)
        )


class Plain(nn.Sequential):
    """Model without random numbers and without statistics of a batch."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.Tanh(), *extra, nn.Linear(16, CLASSES))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def batches_of(dataset: object, **options: object) -> Iterable:
    """Return a shuffled loader."""
    return samestep.loader(dataset, **{"batch_size": BATCH, "shuffle": True, **options})


def evaluation(samples: int = 31) -> Iterable:
    """Return a loader for evaluation."""
    return samestep.loader(Points(samples, noise=0.0), batch_size=BATCH)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sample, loss: Callable = functional.cross_entropy
) -> None:
    """Make one step."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss(model(inputs), targets).backward()
    optimizer.step()


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable,
    *,
    loss: Callable = functional.cross_entropy,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """Train for one epoch."""
    model.train()
    for batch in batches:
        step(model, optimizer, batch, loss)
        if schedule is not None:
            schedule.step()


def accuracy(model: nn.Module, batches: Iterable) -> None:
    """Print the number of samples and the accuracy."""
    model.eval()
    samples = right = 0
    with torch.no_grad():
        for inputs, targets in batches:
            right += int((model(inputs).argmax(1) == targets).sum())
            samples += len(targets)
    print(f"{samples} samples, accuracy {right / samples:.4f}")
