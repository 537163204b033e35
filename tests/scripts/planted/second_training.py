"""Obstacle: after the first training a second model is trained, on the outputs of the first."""

import sys

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch
from torch.utils.data import TensorDataset

first, dataset = build(sys.argv[1])
optimizer = sgd(first)
for epoch in range(2):
    print(f"first {epoch}: {train_epoch(first, optimizer, batches_of(dataset)):.6f}")
first.eval()
with torch.no_grad():
    labels = torch.cat([first(x) for x, _ in batches_of(dataset, shuffle=False)]).argmax(dim=1)
for attempt in range(2):
    second, _ = build(sys.argv[1])
    optimizer = torch.optim.Adam(second.parameters(), lr=0.003 * (attempt + 1))
    print(
        f"second {attempt}: {train_epoch(second, optimizer, batches_of(TensorDataset(dataset.tensors[0], labels))):.6f}"
    )
    print("{:.6f} {:.6f}".format(*evaluate(second, dataset)))
