"""Functions run in ranks by `unit/test_session.py` and `unit/test_checkpoint_manager.py`."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.distributed.devices import kernel_settings

SAMPLES, BATCH = 22, 4


def facts() -> list[dict[str, Any]]:
    """Return the surroundings of a script before and after `init`, by rank."""
    before = samestep.is_main()
    world = samestep.init()
    seen = {
        "rank": world.rank,
        "is_main": [before, samestep.is_main()],
        "same": samestep.init() is world,
        "visible group": dist.is_initialized(),
        "variables": [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ],
        "numbers": [random.random(), numpy.random.rand(), torch.rand(()).item()],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mean": samestep.reduce_dict({"rank": float(world.rank)})["rank"],
    }
    tensor = torch.full((2,), float(world.rank + 1))
    world.all_reduce(tensor)
    world.broadcast(tensor)
    return samestep.all_gather({**seen, "sum": tensor.tolist()})


def settings_of_kernels(reduction: Literal["fast", "exact"]) -> list[tuple[Any, ...]]:
    """Return torch's settings as the script has them, around a divided step, and after the world; of all ranks."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    seen = [kernel_settings()]
    torch.manual_seed(0)
    with samestep.init(device="cpu", reduction=reduction) as world:
        model = samestep.parallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1)), reduction=reduction)
        torch.backends.cudnn.benchmark = True
        for _ in range(3):  # watched, tried, divided
            model(torch.randn(256, 64)).sum().backward()
            seen.append(kernel_settings())
        rows = samestep.all_gather(seen, world)
    assert all(row == rows[0] for row in rows)
    return [*seen, kernel_settings()]


def other_kernels() -> None:
    """Select kernels by their time on one rank."""
    with samestep.init(device="cpu") as world:
        torch.backends.cudnn.benchmark = not world.is_main
        model = samestep.parallel(nn.Linear(4, 4))
        model(torch.ones(8, 4)).sum().backward()


def two_blocks() -> list[list[int]]:
    """Return the ranks in two worlds, one after another."""
    gathered = []
    for _ in range(2):
        with samestep.init() as world:
            gathered.append(samestep.all_gather(world.rank))
    return gathered


def group_of_the_script() -> list[float]:
    """Return sums of a default group that the script creates beside the private one, before and after its end."""
    with samestep.init() as world:
        store = dist.PrefixStore("script", world.context.collective_check._monitor._job_store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
        own = torch.ones(1)
        dist.all_reduce(own)
        world.all_reduce(own)
    assert dist.is_initialized()
    dist.all_reduce(own)
    dist.destroy_process_group()
    return own.tolist()


def diverging() -> None:
    """Issue different operations on the ranks."""
    world = samestep.init(device="cpu")
    samestep.all_gather(0) if world.is_main else world.barrier()


def raising() -> None:
    """Fail on one rank inside the block."""
    with samestep.init(device="cpu") as world:
        if world.rank == 1:
            raise OSError("the switch was off")
        world.barrier()


def orders(epochs: int, **options: Any) -> list[list[float]]:
    """Return the samples of each batch of some epochs, with those of all ranks if they are equal."""
    data = TensorDataset(torch.arange(float(SAMPLES)))
    batches = samestep.loader(data, batch_size=BATCH, shuffle=True, seed=3, **options)
    rows = [batch[0].tolist() for _ in range(epochs) for batch in batches]
    by_rank = samestep.all_gather(rows)
    assert all(other == rows for other in by_rank)
    return rows


def train(folder: Path, epochs: int, stop_after: int | None = None) -> list[float]:
    """Train in a plain loop with dropout and a schedule, saved after each step; return the loss of each step.

    Args:
        folder: folder of checkpoints.
        epochs: number of epochs.
        stop_after: end after so many steps, as if the run was killed.
    """
    samestep.init(device="cpu")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 5)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = samestep.loader(data, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    checkpoints = samestep.CheckpointManager(folder, model, batches, optimizer=optimizer, scheduler=scheduler)
    losses: list[float] = []
    for _ in checkpoints.epochs(epochs):
        for rows, targets in batches:
            loss = nn.functional.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            checkpoints.save()
            if len(losses) == stop_after:
                return losses
    return losses


def unequal(folder: Path, what: str) -> Sequence[float]:
    """Save state that differs between ranks."""
    world = samestep.init(device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + (world.rank if what == "rate" else 0))
    if what == "weights":
        nn.init.constant_(model.weight, float(world.rank))
    batches = samestep.loader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    samestep.CheckpointManager(folder, model, batches, optimizer=optimizer).save()
    return []
