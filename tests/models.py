"""Small models that tests share."""

import math

import torch
from torch import nn


def seeded(seed: int, make: type[nn.Module], *arguments: object, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model whose weights are a function of `seed`, whatever else is drawn in this process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*arguments).to(dtype)


class Perceptron(nn.Sequential):
    """Two layers without anything random and without buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


class Normed(nn.Sequential):
    """With batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))


class Tokens(nn.Module):
    """Predicts each token from itself, with one matrix at both ends."""

    def __init__(self, vocabulary: int = 11, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.drop(torch.tanh(self.mix(self.norm(hidden))))
        return self.out(hidden).transpose(1, 2)


class Picky(nn.Module):
    """Uses its second layer only for shards whose first sample begins with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.always(inputs)
        return outputs + self.sometimes(inputs) if inputs[0, 0] > 0 else outputs


class Recorder(nn.Module):
    """Remembers what it drew in each forward, by the first sample of the shard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.drawn: dict[float, float] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.drawn[float(inputs[0, 0])] = float(torch.rand((), dtype=torch.float64))
        return self.linear(inputs)


class Root(nn.Module):
    """Roots of scaled inputs where these are not zero: where one is, the loss is finite and its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        roots = (self.scale * inputs).abs().sqrt()
        return self.linear(torch.where(inputs == 0, 0.0, roots))


class Fragile(Normed):
    """Fails where a shard has a number above a thousand."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if bool((inputs > 1000).any()):
            raise ArithmeticError("too large")
        return outputs


class Watching(Perceptron):
    """Counts its forwards, and keeps the sum of what it last saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            self.last = inputs.sum(0)
        return super().forward(inputs)
