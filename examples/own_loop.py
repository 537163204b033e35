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
    model = nn.Sequential(
        nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5)
    )
    model = samestep.parallel(
        model, reduction="exact", strict=True
    )  # strict divides small calls too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = samestep.loader(dataset, batch_size=64, shuffle=True)
    for _ in range(5):
        for features, targets in batches:
            loss = nn.functional.cross_entropy(model(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if samestep.is_main():
        print(f"loss {loss:.6f}")
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else None
    print(samestep.launch(train, processes=processes) if processes else train())
