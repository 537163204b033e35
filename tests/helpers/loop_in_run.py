"""A training loop with a run directory: `python loop_in_run.py PROCESSES EPOCHS KILL_AT LOGGER...`."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep


def train(epochs: int, kill_at: int, loggers: list[str]) -> None:
    """Train; rank 0 kills itself after the step `kill_at`."""
    torch.manual_seed(0)
    inputs = torch.randn(120, 20)
    data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
    model = nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with samestep.start(run="first", loggers=loggers) as world:
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, metrics=["accuracy"])
        batches = samestep.loader(data, batch_size=12, microbatches=6, shuffle=True, world=world)
        with samestep.CheckpointManager("runs/first/checkpoints", engine, batches, best_by="accuracy") as checkpoints:
            for epoch in checkpoints.epochs(epochs):
                for batch in batches:
                    step = engine.step(batch).step
                    world.log(step, {"tenth": step / 10})
                    if step == kill_at and world.is_main:
                        os.kill(os.getpid(), signal.SIGKILL)
                values = engine.evaluate(batches)
                engine.evaluate(batches)
                checkpoints.save(values)
                world.log(engine.steps, {"epoch": epoch})


if __name__ == "__main__":
    processes, epochs, kill_at = map(int, sys.argv[1:4])
    samestep.launch(train, epochs, kill_at, sys.argv[4:], processes=processes)
