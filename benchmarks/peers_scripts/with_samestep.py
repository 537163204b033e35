"""Usage: `python with_samestep.py OUTPUT --processes N --reduction exact|fast`."""

from pathlib import Path

import digits_task as task
import torch
from torch import nn

import samestep
from samestep.config import Reduction


def train(output: Path, dropout: float, reduction: Reduction) -> None:
    torch.manual_seed(task.SEED)
    training, held_out = task.build_datasets()
    model = task.build_model(dropout)
    world = samestep.init(reduction=reduction)
    samestep.parallel(model, reduction=reduction, microbatches=8)
    optimizer = task.build_optimizer(model)
    batches = samestep.loader(training, batch_size=task.BATCH_SIZE, shuffle=True)
    for _ in range(task.EPOCHS):
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    model.eval()
    samples = correct = 0
    with torch.no_grad():
        for inputs, targets in samestep.loader(held_out, batch_size=task.BATCH_SIZE):
            samples += len(targets)
            correct += int((model(inputs).argmax(dim=1) == targets).sum())
    if world.is_main:
        steps, accuracy = task.EPOCHS * len(batches), correct / samples
        task.report(output, model, processes=world.size, steps=steps, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    for dropout in options.dropout:
        samestep.launch(train, options.output, dropout, options.reduction, processes=options.processes)
