"""A small model shared by tests, and the hash of a model."""

import hashlib

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
