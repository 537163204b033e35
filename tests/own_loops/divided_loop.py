"""A plain loop with the whole interface: `divided_loop.py FOLDER EPOCHS KILL_AT`.

Prints one line of JSON on rank 0, and writes the final weights to `FOLDER/weights.pt`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from samestep.view.view import View

View.divides_small_calls = True
SAMPLES = 50
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def train(folder: Path, epochs: int, kill_at: int = 0) -> dict[str, Any]:
    """Train, and kill rank 0 after the step `kill_at` of this start; return what the script sees."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    batches = samestep.loader(data, batch_size=12, shuffle=True, seed=1)
    layers = (nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    model = samestep.parallel(nn.Sequential(*layers).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer)
    checkpoints.resume()
    steps = 0
    for _ in samestep.epochs(batches, epochs):
        for rows, targets in batches:
            loss = functional.cross_entropy(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            checkpoints.save()
            if steps == kill_at and samestep.is_main():
                os.kill(os.getpid(), signal.SIGKILL)
    seen = {"steps": steps, "evaluation": samestep.all_gather(evaluate(model, data))}
    seen |= {"variables": [name for name in VARIABLES if name in os.environ]}
    seen |= {"own branch": "RANK" in os.environ or torch.distributed.is_initialized()}  # as nanoGPT decides on DDP
    if samestep.is_main():
        torch.save(model.state_dict(), folder / "weights.pt")
    return seen


def evaluate(model: nn.Module, data: TensorDataset) -> list[float]:
    """Return samples, right ones, and the accuracy of torchmetrics; the last batch has two samples."""
    from torchmetrics.classification import MulticlassAccuracy

    metric = MulticlassAccuracy(3, average="micro")
    samples = right = 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in torch.utils.data.DataLoader(data, batch_size=16):
            outputs = model(inputs)
            metric.update(outputs, targets)
            samples += len(outputs)
            right += int((outputs.argmax(dim=1) == targets).sum())
    return [samples, right, metric.compute().item()]


if __name__ == "__main__":
    result = train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    if samestep.is_main():
        print(json.dumps(result))
