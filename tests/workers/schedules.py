"""Training loop with one of torch's schedulers, for `unit/engine/test_learning_rate.py`."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import samestep
from helpers.batches import random_data
from helpers.models import Perceptron, seeded

SAMPLES, BATCH, EPOCHS, RATE = 37, 8, 6, 0.1  # 5 steps in an epoch
STEPS = 5
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=EPOCHS),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.1),
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.MultiStepLR(o, [1, 3])], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
}


def train(world: samestep.World, name: str, folder: Path, stop: int | None = None) -> tuple[str, list[float]]:
    """Train to the end or to step `stop`, where a checkpoint is saved, and return bits and learning rates."""
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    engine = samestep.Engine(
        model, optimizer, samestep.cross_entropy, world=world, scheduler=scheduler, scheduler_interval="epoch"
    )
    batches = samestep.loader(
        TensorDataset(*random_data(SAMPLES)), batch_size=BATCH, microbatches=4, shuffle=True, world=world
    )
    rates = []
    with samestep.CheckpointManager(folder, engine, batches) as checkpoints:
        checkpoints.resume()
        while batches.cursor.epoch < EPOCHS:
            for batch in batches:
                rates.append(engine.step(batch).lr)
                if engine.steps == stop:
                    checkpoints.save()
                    return "", rates
            if name == "plateau":
                scheduler.step(engine.evaluate(batches_of_evaluation(world))["loss"])
    tensors = model.state_dict().values()
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest(), rates


def batches_of_evaluation(world: samestep.World) -> samestep.loader:
    return samestep.loader(TensorDataset(*random_data(20, seed=1)), batch_size=BATCH, microbatches=4, world=world)


def run(name: str, folder: Path, stop: int | None = None) -> tuple[str, list[float]]:
    """Call `train` on every rank."""
    with samestep.start(device="cpu") as world:
        return train(world, name, folder, stop)
