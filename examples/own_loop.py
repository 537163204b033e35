"""Training loop that gives the same weights on one process, on several processes and under torchrun."""

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep


def train() -> str:
    """Train a small classifier and return the SHA-256 of the weights."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 20)
    dataset = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with samestep.start() as world:
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world)
        batches = samestep.loader(dataset, batch_size=64, microbatches=4, shuffle=True, world=world)
        for _ in range(5):
            for batch in batches:
                result = engine.step(batch)
        if world.is_main:
            print(f"{world.size} ranks: loss {result.loss:.6f} after {result.step} steps")
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else None
    print(samestep.launch(train, processes=processes) if processes else train())
