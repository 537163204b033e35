"""Shared code of the scripts in this folder: data, models and a training loop."""

import torch
from torch import nn

import samestep
from samestep.zoo.splits import Splits

SAMPLES, FEATURES, CLASSES, BATCH = 117, 12, 4, 32
Sample = tuple[torch.Tensor, torch.Tensor]


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


class Lines:
    """Lines of 1 to 9 tokens, padded to 9; the target of a token is the next one, that of padding is -100."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(8)
        self.tokens = torch.randint(0, 20, (samples, 10), generator=generator)
        self.lengths = 1 + torch.arange(samples) % 9

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        tokens, targets = self.tokens[index, :9].clone(), self.tokens[index, 1:].clone()
        targets[self.lengths[index] :] = -100
        return tokens, targets


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


class TokenNet(nn.Module):
    """Model from tokens `(N, T)` to logits `(N, C, T)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(tokens))).transpose(1, 2)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def batches_of(world: samestep.World, dataset: object, **options: object) -> samestep.loader:
    """Return a shuffled loader."""
    settings = {"batch_size": BATCH, "microbatches": 8, "shuffle": True, **options}
    return samestep.loader(dataset, world=world, **settings)


def evaluation(world: samestep.World, samples: int = 31) -> samestep.loader:
    """Return a loader for evaluation."""
    return samestep.loader(Points(samples, noise=0.0), batch_size=BATCH, microbatches=8, world=world)


def fit(engine: samestep.Engine, batches: samestep.loader) -> None:
    """Train for one epoch."""
    for batch in batches:
        engine.step(batch)
