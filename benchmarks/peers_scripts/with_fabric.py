"""Usage: `python with_fabric.py OUTPUT --processes N`."""

from pathlib import Path

import digits_task as task
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader


def train(output: Path, dropout: float, processes: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=processes, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(task.SEED, workers=True, verbose=False)
    training, held_out = task.build_datasets()
    batch_size = task.BATCH_SIZE // fabric.world_size
    net = task.build_model(dropout)
    model, optimizer = fabric.setup(net, task.build_optimizer(net))
    batches, held_out_batches = fabric.setup_dataloaders(
        DataLoader(training, batch_size=batch_size, shuffle=True), DataLoader(held_out, batch_size=batch_size)
    )
    steps = 0
    for _ in range(task.EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            steps += 1

    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for inputs, targets in held_out_batches:
            correct = (model(inputs).argmax(dim=1) == targets).sum()
            counts += torch.stack([correct, torch.tensor(len(targets))])
    correct, samples = fabric.all_reduce(counts, reduce_op="sum").tolist()
    if fabric.is_global_zero:
        accuracy = correct / samples
        task.report(output, net, processes=fabric.world_size, steps=steps, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    for dropout in options.dropout:
        train(options.output, dropout, options.processes)
