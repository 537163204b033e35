"""Obstacle: a pool of processes prepares the data."""

import multiprocessing
import sys

import numpy as np
import torch
from bases import batches_of, build, evaluate, sgd, train_epoch
from torch.utils.data import TensorDataset


def scale(row):
    return (row - row.mean()) / row.std()


if __name__ == "__main__":
    model, dataset = build(sys.argv[1])
    with multiprocessing.Pool(2) as pool:
        rows = pool.map(scale, [x.numpy() for x in dataset.tensors[0]], chunksize=60)
    dataset = TensorDataset(torch.from_numpy(np.stack(rows)), dataset.tensors[1])
    optimizer = sgd(model)
    for epoch in range(2):
        print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
