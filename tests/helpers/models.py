"""Small models shared by tests, and the hash of a model."""

import hashlib
import math

import torch
from torch import nn


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of weights and buffers, in the order of their names."""
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[name].cpu().numpy().tobytes() for name in sorted(state))).hexdigest()


def seeded(seed: int, kind: type[nn.Module], *arguments: object, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a model whose weights depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(*arguments).to(dtype)


class Perceptron(nn.Sequential):
    """Two linear layers, without dropout and buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


class Normed(nn.Sequential):
    """Linear layers with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4))


class Tokens(nn.Module):
    """Predicts each token from itself; embedding and output weights are tied."""

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
    """Uses the second layer only if the first value of the first sample is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.always(inputs)
        return outputs + self.sometimes(inputs) if inputs[0, 0] > 0 else outputs


class Recorder(nn.Module):
    """Records one random number per forward, by the first value of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.drawn: dict[float, float] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.drawn[float(inputs[0, 0])] = float(torch.rand((), dtype=torch.float64))
        return self.linear(inputs)


class Root(nn.Module):
    """Square roots of scaled inputs, 0 for an input of 0: the loss is finite and the gradient at 0 is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        roots = (self.scale * inputs).abs().sqrt()
        return self.linear(torch.where(inputs == 0, 0.0, roots))


class Fragile(Normed):
    """Raises for inputs above 1000."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if bool((inputs > 1000).any()):
            raise ArithmeticError("too large")
        return outputs


class Watching(Perceptron):
    """Counts forwards and stores the sum of the last inputs in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            self.last = inputs.sum(0)
        return super().forward(inputs)
