"""Functions run in ranks by `unit/test_session.py` and `unit/test_checkpoint_manager.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

SAMPLES, BATCH = 22, 4


def orders(epochs: int, **options: Any) -> list[list[float]]:
    """Return the samples of each batch of some epochs, with those of all ranks if they are equal."""
    data = TensorDataset(torch.arange(float(SAMPLES)))
    batches = samestep.loader(data, batch_size=BATCH, shuffle=True, seed=3, **options)
    rows = [batch[0].tolist() for _ in range(epochs) for batch in batches]
    by_rank = samestep.all_gather(rows)
    assert all(other == rows for other in by_rank)
    return rows


def train(folder: Path, epochs: int, stop_after: int | None = None) -> list[float]:
    """Train in a plain loop with dropout and a schedule, saved after each step; return the loss of each step.

    Args:
        folder: folder of checkpoints.
        epochs: number of epochs.
        stop_after: end after so many steps, as if the run was killed.
    """
    samestep.init(device="cpu")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = samestep.loader(data, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer, scheduler=scheduler)
    losses: list[float] = []
    for _ in checkpoints.epochs(epochs):
        for rows, targets in batches:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            checkpoints.save()
            if len(losses) == stop_after:
                return losses
    return losses


def unequal(folder: Path, what: str) -> Sequence[float]:
    """Save state that differs between ranks."""
    world = samestep.init(device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + (world.rank if what == "rate" else 0))
    if what == "weights":
        nn.init.constant_(model.weight, float(world.rank))
    batches = samestep.loader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    samestep.CheckpointManager(folder, model, batches, optimizer=optimizer).save()
    return []
