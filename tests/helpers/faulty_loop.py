"""Custom training loop in which one rank diverges from the others, once.

samestep run tests/helpers/faulty_loop.py KIND RANK STEP
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.launcher.process_state import rank_and_size


def main(kind: str, rank: int, step: int) -> None:
    """Train on random data."""
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    torch.manual_seed(0)
    samestep.init(device="cpu")
    own = rank_and_size()[0]
    model = samestep.parallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = samestep.loader(dataset, 8, shuffle=True)
    with samestep.CheckpointManager("loop", model, batches, optimizer=optimizer) as checkpoints:
        checkpoints.resume()
        done = batches.cursor.samples // 8
        for number, (rows, targets) in enumerate(batches, start=done + 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            if number % 4 == 0:
                checkpoints.save()
            if own == rank and number == step and Path("fault").exists():
                Path("fault").rename("fired.json")
                os.utime("fired.json")
                if kind == "fewer batches":
                    break


if __name__ == "__main__":
    name, at, when = sys.argv[1:]
    main(name, int(at), int(when))
