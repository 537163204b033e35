"""Rank functions for `parity/test_multi_loss.py`: a model with two outputs, and terms with different counts."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import samestep
from helpers.models import Tokens, seeded
from samestep.config import Reduction, StepConfig
from samestep.data.loader import Loader
from samestep.engine.engine import Engine
from samestep.errors import InputError
from workers.loader import gathered

World = samestep.World
MICROBATCHES, BATCH, SIZE, STEPS, SEED, RATE = 8, 16, 37, 6, 4, 0.02  # the last batch of an epoch has 5 samples
CLASSES = 11
WEIGHTS = tuple(0.25 * (1 + number) for number in range(CLASSES))
RARE = 10  # in no target: the count of its term is 0
Sample = tuple[torch.Tensor, dict[str, torch.Tensor]]
Mapping = dict[str, torch.Tensor]


class Lines:
    """Token sequences of different lengths; targets are the next tokens and the length."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(6)
        lengths = torch.randint(2, 20, (SIZE,), generator=generator).tolist()
        self._lines = [torch.randint(1, CLASSES - 1, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int, /) -> Sample:
        line = self._lines[index]
        return line[:-1], {"next": line[1:], "length": torch.tensor(len(line) / 20, dtype=torch.float64)}


def padded(samples: list[Sample]) -> tuple[torch.Tensor, Mapping]:
    inputs = pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    following = pad_sequence([targets["next"] for _, targets in samples], batch_first=True, padding_value=-100)
    return inputs, {"next": following, "length": torch.stack([targets["length"] for _, targets in samples])}


class TwoOutputs(nn.Module):
    """Returns logits of the next tokens, and one number per line."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.length, self.rare = Tokens(CLASSES), nn.Linear(CLASSES, 1), nn.Linear(CLASSES, 1)

    def forward(self, tokens: torch.Tensor) -> Mapping:
        logits = self.tokens(tokens)
        first = logits[..., 0]
        return {"next": logits, "length": self.length(first)[:, 0], "rare": self.rare(first)[:, 0]}


def loss_of(model: nn.Module) -> samestep.MultiLoss:
    """Return terms counted by tokens, weighted tokens, samples and absent tokens, and a penalty on weights."""
    return samestep.MultiLoss(
        [
            samestep.LossTerm("tokens", tokens, lambda targets: (targets["next"] != -100).sum()),
            samestep.LossTerm("weighted", weighted, weight_of, weight=0.5),
            samestep.LossTerm("length", squared, weight=3.0),
            samestep.LossTerm("rare", rare, lambda targets: (targets["next"] == RARE).any(1).sum()),
            samestep.LossTerm("penalty", lambda outputs, targets: penalty(model), "once", weight=0.01),
        ]
    )


def tokens(outputs: Mapping, targets: Mapping) -> torch.Tensor:
    return samestep.cross_entropy(outputs["next"], targets["next"]).sum


def weighted(outputs: Mapping, targets: Mapping) -> torch.Tensor:
    return samestep.cross_entropy(outputs["next"], targets["next"], weight=WEIGHTS, label_smoothing=0.1).sum


def weight_of(targets: Mapping) -> torch.Tensor:
    numbers = targets["next"]
    return torch.tensor(WEIGHTS, dtype=torch.float64)[numbers[numbers != -100]].sum()


def squared(outputs: Mapping, targets: Mapping) -> torch.Tensor:
    return ((outputs["length"] - targets["length"]) ** 2).sum()


def rare(outputs: Mapping, targets: Mapping) -> torch.Tensor:
    return (outputs["rare"] * (targets["next"] == RARE).any(1)).sum()


def penalty(model: nn.Module) -> torch.Tensor:
    return torch.stack([(parameter**2).sum() for parameter in model.parameters()]).sum()


def plain_loss(model: nn.Module, inputs: torch.Tensor, targets: Mapping) -> torch.Tensor:
    """Return the loss of a whole batch with means of torch."""
    outputs, following = model(inputs), targets["next"]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return (
        functional.cross_entropy(outputs["next"], following)
        + 0.5 * functional.cross_entropy(outputs["next"], following, weight=weights, label_smoothing=0.1)
        + 3.0 * functional.mse_loss(outputs["length"], targets["length"])
        + 0.0 * outputs["rare"].sum()
        + 0.01 * penalty(model)
    )


class CloseLengths:
    """A metric of outputs in a mapping."""

    name = "close_lengths"

    def __init__(self) -> None:
        self._counts = torch.zeros(2, dtype=torch.float64)

    def update(self, outputs: Mapping, targets: Mapping) -> None:
        close = (outputs["length"] - targets["length"]).abs() < 0.1
        self._counts += torch.tensor([close.sum(), len(close)])

    def compute(self, world: World) -> float:
        world.all_reduce(self._counts)
        return float(self._counts[0] / self._counts[1])


def loader_of(world: World, *, shuffle: bool) -> Loader:
    return Loader(
        Lines(), batch_size=BATCH, microbatches=MICROBATCHES, world=world, seed=SEED, shuffle=shuffle, collate_fn=padded
    )


def train(world: World, reduction: Reduction) -> dict[str, Any]:
    """Return bits, losses, counts and evaluation of a training."""
    model = seeded(1, TwoOutputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    config = StepConfig(seed=SEED, reduction=reduction)
    engine = Engine(model, optimizer, loss_of(model), world=world, config=config)
    batches, results = loader_of(world, shuffle=True), []
    while engine.steps < STEPS:
        results += [engine.step(batch) for batch in batches]
    weights = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    return {
        "bits": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "weights": weights.tolist(),
        "losses": [result.loss for result in results],
        "counts": [result.count for result in results],
        "evaluation": engine.evaluate(loader_of(world, shuffle=False), [CloseLengths()]),
    }


def use_negative_count(world: World) -> tuple[str, str]:
    """Return the error of a term with a negative count in one microbatch."""
    longest = max(Lines()[index][1]["length"] for index in range(BATCH))

    def counted(targets: Mapping) -> float:
        return -1.0 if bool((targets["length"] == longest).any()) else 1.0

    model = seeded(1, TwoOutputs)
    loss = samestep.MultiLoss([samestep.LossTerm("length", squared, counted)])
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=RATE), loss, world=world)
    try:
        engine.step(next(iter(loader_of(world, shuffle=False))))
    except InputError as error:
        return error.code, error.value
    return "", ""


CHECKS: dict[str, Callable[[World], Any]] = {
    "exact": partial(train, reduction="exact"),
    "fast": partial(train, reduction="fast"),
    "negative count": use_negative_count,
}


def run_checks() -> dict[str, list[Any]]:
    """Return the results of every check, by rank."""
    with samestep.start(device="cpu") as world:
        return {name: gathered(check(world)) for name, check in CHECKS.items()}
