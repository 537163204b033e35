"""Custom training loop in which one rank diverges from the others, once.

samestep run tests/helpers/faulty_loop.py KIND RANK STEP CHECK_EVERY
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import samestep


def main(kind: str, rank: int, step: int, check_every: int | None) -> None:
    """Train, with a user-defined collective after each step."""
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with samestep.start(device="cpu") as world:
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, check_every=check_every)
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
                if not (fires and kind == "skip"):
                    reduce_counts(kind if fires else "")


def reduce_counts(kind: str) -> None:
    """Issue one collective of all ranks, with the injected difference."""
    dtype = torch.float64 if kind == "other dtype" else torch.float32
    dist.all_reduce(torch.ones(4 if kind == "other shape" else 3, dtype=dtype))
    if kind == "extra barrier":
        dist.barrier()


if __name__ == "__main__":
    name, at, when, every = sys.argv[1:]
    main(name, int(at), int(when), int(every) or None)
