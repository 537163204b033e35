"""Models and data for tests of pipelines."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from samestep.zoo.models import GPT

CLASSES = 4


class Deep(nn.Module):
    """Batch norm, an in-place activation, a frozen layer, a layer that is used twice, and a skip connection."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = hidden = self.norm(self.first(inputs))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = self.drop(self.act(block(hidden)))
        logits: torch.Tensor = self.last(self.frozen(hidden) + first)
        return logits


class HalfFrozen(Deep):
    """Model whose trained modules are all in one of two stages."""

    def __init__(self, trained: tuple[str, ...]) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))


class Layouts(nn.Module):
    """Stages that exchange a transposed tensor and an unaligned one, whose gradients are a slice and an expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 5 * 7), nn.Sequential(nn.GELU(), nn.Linear(5, 9))
        self.third, self.last = nn.Sequential(nn.Linear(9, 11), nn.GELU()), Pooled(11, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs).unflatten(1, (5, 7)).transpose(1, 2))
        logits: torch.Tensor = self.last(self.third(hidden[:, 1:]))
        return logits


class Pooled(nn.Linear):
    """Linear layer of a mean over the second dimension."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.mean(dim=1))


class Draws(nn.Module):
    """Layer that draws from all generators in training, once `is_active`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.is_active = nn.Linear(width, width), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.linear(inputs)
        if self.is_active and self.training:
            # NumPy draws Gaussian numbers in pairs: the second of a pair is used in another stage.
            outputs = outputs * (random.random() + numpy.random.normal())
            outputs = nn.functional.dropout(outputs, 0.2)
        return outputs


class SharedFunction(nn.Module):
    """Model with a function of a parameter that several stages use, and a parameter that several stages use twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.square = nn.Parameter(torch.ones(12)), nn.Linear(12, 12)
        self.layers, self.last = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)]), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factor, hidden = torch.exp(self.scale / 3), inputs
        for layer in self.layers:
            hidden = torch.tanh(self.square(self.square(layer(hidden))) * factor)
        logits: torch.Tensor = self.last(hidden)
        return logits


def points() -> Any:
    """Return 91 samples: batches of 20 in 5 microbatches of 4, and a last batch of 11."""
    inputs = torch.randn(91, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def padded(sentences: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad to the longest sentence of the microbatch: microbatches of one batch have different shapes."""
    inputs = pad_sequence([sentence[:-1] for (sentence,) in sentences], batch_first=True)
    targets = pad_sequence([sentence[1:] for (sentence,) in sentences], batch_first=True, padding_value=-100)
    return inputs, targets


def sentences() -> Any:
    """Return 82 texts of different lengths; the last batch has 2, so some ranks and microbatches are empty."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 7, (82,), generator=generator).tolist()
    return [(torch.randint(1, 11, (length,), generator=generator),) for length in lengths]


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "deep": (Deep, points, {}),
    "text": (partial(GPT, 11, 8, 2, 5, 8), sentences, {"collate_fn": padded}),
    "dropout": (partial(Deep, 0.3), points, {}),
    "language": (partial(GPT, 11, 8, 2, 5, 8, 0.2), sentences, {"collate_fn": padded}),
    "layouts": (Layouts, points, {}),
    "draws": (lambda: nn.Sequential(*(Draws(12) for _ in range(3)), nn.Linear(12, CLASSES)), points, {}),
    "shared function": (SharedFunction, points, {}),
    "first frozen": (partial(HalfFrozen, ("blocks.4", "last")), points, {}),
    "last frozen": (partial(HalfFrozen, ("first", "norm", "blocks.0")), points, {}),
}
