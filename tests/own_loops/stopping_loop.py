"""A loop that ends on request: `stopping_loop.py FOLDER RANK STEP`, a rank that requests the end in a step, if any.

Each step adds its number to `steps.txt`; the last epoch writes the final weights to `FOLDER/weights.pt`.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.view.view import View

View.divides_small_calls = True
EPOCHS = 3
STEPS_PER_EPOCH = 5


def train(folder: Path, rank: int = -1, step: int = -1, accumulate: int = 1, seconds: float = 0.0) -> int:
    """Train `EPOCHS` epochs; return the number of evaluations.

    Args:
        folder: folder of the checkpoints.
        rank: rank that requests the end; -1 for none.
        step: step of this start, from 1, in which it does.
        accumulate: batches of a step.
        seconds: duration of a step.
    """
    torch.manual_seed(0)
    inputs = torch.randn(60, 6, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    batches = samestep.loader(data, 12 // accumulate, shuffle=True, seed=1)
    model = samestep.parallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer, scheduler=scheduler)
    world = samestep.init()
    steps = evaluations = 0
    for _ in checkpoints.epochs(EPOCHS):
        for number, (rows, targets) in enumerate(batches, start=1):
            nn.functional.cross_entropy(model(rows), targets).backward()
            if world.rank == rank and steps + 1 == step:
                samestep.request_stop()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                _note(folder, steps)
                time.sleep(seconds)
        scheduler.step()
        evaluations += 1
    if samestep.is_main():
        torch.save(model.state_dict(), folder / "weights.pt")
    return evaluations


def _note(folder: Path, step: int) -> None:
    if samestep.is_main():
        with (folder / "steps.txt").open("a", encoding="utf-8") as file:
            file.write(f"{step}\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), seconds=float(sys.argv[4]))
