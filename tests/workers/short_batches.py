"""Training of models with batch norm on data whose last batch has few samples."""

import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

BATCH_SIZE, MICROBATCHES = 16, 4


def net() -> nn.Module:
    """Layers for which batch norm has one value per sample and channel: it fails on one sample."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))


def train_on_each(sizes: tuple[int, ...], *shares: int) -> dict[int, tuple[str, list[int]]]:
    """Return the digest of model and losses, and the microbatches of each step, for numbers of samples."""
    with samestep.start(strategy=samestep.StrategyConfig(shares=shares)) as world:
        return {size: _train(world, size) for size in sizes}


def _train(world: samestep.World, size: int) -> tuple[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator))
    model = net()
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters(), 0.1), samestep.cross_entropy, world=world)
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "microbatches": MICROBATCHES, "keeps_microbatch_size": True}
    loader = samestep.loader(data, shuffle=True, world=world, **options)
    digest, microbatches = hashlib.sha256(), []
    for _ in range(2):
        for batch in loader:
            microbatches.append(batch.microbatches)
            digest.update(repr(engine.step(batch).loss).encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest(), microbatches
