"""Usage: `python with_samestep.py OUTPUT --processes N --reduction exact|fast`."""

from pathlib import Path

import digits_task as task
import torch
from torch import nn

import samestep
from samestep.config import Reduction
from samestep.metrics.metrics import build_metrics


def train(output: Path, dropout: float, reduction: Reduction) -> None:
    torch.manual_seed(task.SEED)
    training, held_out = task.build_datasets()
    model = task.build_model(dropout)
    config = samestep.StepConfig(seed=task.SEED, reduction=reduction)
    with samestep.start(reduction=reduction) as world:
        engine = samestep.Engine(model, task.build_optimizer(model), nn.CrossEntropyLoss(), world=world, config=config)
        batches = samestep.loader(training, batch_size=task.BATCH_SIZE, microbatches=8, shuffle=True, world=world)
        for _ in range(task.EPOCHS):
            for batch in batches:
                result = engine.step(batch)

        held_out_batches = samestep.loader(held_out, batch_size=task.BATCH_SIZE, microbatches=8, world=world)
        values = engine.evaluate(held_out_batches, build_metrics(("accuracy",), task.CLASSES))
        if world.is_main:
            samples, accuracy = int(values["samples"]), values["accuracy"]
            task.report(output, model, processes=world.size, steps=result.step, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    for dropout in options.dropout:
        samestep.launch(train, options.output, dropout, options.reduction, processes=options.processes)
