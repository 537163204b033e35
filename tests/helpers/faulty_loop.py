"""Custom training loop in which one rank diverges from the others, once.

samestep run tests/helpers/faulty_loop.py KIND RANK STEP
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import samestep


def main(kind: str, rank: int, step: int) -> None:
    """Train, with a user-defined collective after each step."""
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with samestep.start(device="cpu") as world:
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world)
        batches = samestep.loader(dataset, batch_size=8, microbatches=4, shuffle=True, world=world)
        with samestep.CheckpointManager("loop", engine, batches) as checkpoints:
            checkpoints.resume()
            for batch in batches:
                engine.step(batch)
                if engine.steps % 4 == 0:
                    checkpoints.save()
                fires = world.rank == rank and engine.steps == step and Path("fault").exists()
                if fires:
                    Path("fault").rename("fired.json")
                    os.utime("fired.json")
                if fires and kind == "fewer batches":
                    break
                dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    name, at, when = sys.argv[1:]
    main(name, int(at), int(when))
