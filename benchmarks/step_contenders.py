"""Contenders of `step_time.py`: steps of Samestep, a hand-written DDP loop, Accelerate, Lightning Fabric and Trainer.

All of them live in the same processes and share the process group that `samestep.start()` made. Each has a model of
its own with the same initial weights, and two sources of batches: `ready`, fixed tensors in memory, and `loader`, the
usual loader of its users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

import numpy
import torch
from step_lightning import TrainerLoop
from step_models import build_dataset, build_model, build_optimizer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep
from samestep.config import Reduction
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.microbatches import Cursor, microbatch_bounds, owned_microbatches
from samestep.torchvision_import import make_torchvision_importable

Feed = Literal["ready", "loader"]
READY = 8  # global batches that the ready feed goes round

HAND_WRITTEN, AGAIN = "hand-written DDP", "hand-written DDP, again"
ACCELERATE, FABRIC, TRAINER = "Accelerate", "Lightning Fabric", "Lightning Trainer"
REDUCTIONS: tuple[Reduction, ...] = ("exact", "fast")


@dataclass(frozen=True)
class Setting:
    """Common values of all contenders.

    Attributes:
        batch_size: samples of a global batch, over all processes.
    """

    model: str
    batch_size: int

    def local_size(self, world: samestep.World) -> int:
        return self.batch_size // world.size


@dataclass(frozen=True)
class Contender:
    """One way to make optimizer steps.

    Attributes:
        deterministic: whether its turns use deterministic kernels.
        microbatches: microbatches a rank; 1 for those that know no microbatches.
        model: with the parameters that `step` moves.
        step: one optimizer step from one batch of its feeds; the loss, over this rank's samples or over all.
        feeds: endless.
    """

    name: str
    deterministic: bool
    microbatches: int
    model: nn.Module
    step: Callable[[Any], torch.Tensor | float]
    feeds: dict[Feed, Iterator[Any]]

    def take_steps(self, feed: Feed, count: int) -> None:
        batches = self.feeds[feed]
        for _ in range(count):
            self.step(next(batches))


def build_contender(name: str, setting: Setting, world: samestep.World) -> Contender:
    """Return a contender: one of those above, or `samestep exact` or `fast` with its microbatches per rank."""
    builders = {
        HAND_WRITTEN: _hand_written,
        AGAIN: _hand_written,
        ACCELERATE: _accelerate,
        FABRIC: _fabric,
        TRAINER: _trainer,
    }
    if name in builders:
        return builders[name](name, setting, world)
    reduction, microbatches = _ours_of(name)
    return _ours(name, reduction, microbatches, setting, world)


def ours(reduction: Reduction, microbatches: int = 1) -> str:
    """The name of our contender."""
    return f"samestep {reduction}" + (f", {microbatches} microbatches a rank" if microbatches > 1 else "")


def _ours_of(name: str) -> tuple[Reduction, int]:
    reduction, _, rest = name.removeprefix("samestep ").partition(", ")
    return ("exact" if reduction == "exact" else "fast"), int(rest.split()[0]) if rest else 1


def _ours(name: str, reduction: Reduction, microbatches: int, setting: Setting, world: samestep.World) -> Contender:
    model = build_model(setting.model)
    rules = samestep.StepConfig(reduction=reduction)
    engine = samestep.Engine(model, build_optimizer(model), samestep.cross_entropy, world=world, config=rules)
    loader = samestep.loader(
        build_dataset(setting.model),
        batch_size=setting.batch_size,
        microbatches=microbatches * world.size,
        shuffle=True,
        world=world,
    )
    dataset, total = build_dataset(setting.model), microbatches * world.size
    ready = [_global_batch(dataset, indices, total, world) for indices in _ready_indices(setting)]
    feeds: dict[Feed, Iterator[Any]] = {"ready": cycle(ready), "loader": _endless(loader)}
    return Contender(name, reduction == "exact", microbatches, model, lambda batch: engine.step(batch).loss, feeds)


def _hand_written(name: str, setting: Setting, world: samestep.World) -> Contender:
    model = build_model(setting.model)
    ddp = DistributedDataParallel(model)
    optimizer = build_optimizer(ddp)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    sampler: DistributedSampler[Any] = DistributedSampler(build_dataset(setting.model), shuffle=True)
    loader = DataLoader(sampler.dataset, batch_size=setting.local_size(world), sampler=sampler)
    return Contender(name, False, 1, model, step, _peer_feeds(setting, world, _endless(loader, sampler.set_epoch)))


def _accelerate(name: str, setting: Setting, world: samestep.World) -> Contender:
    from accelerate import Accelerator

    _set_environment(world)
    accelerator = Accelerator(cpu=True)
    model = build_model(setting.model)
    loader = DataLoader(build_dataset(setting.model), batch_size=setting.local_size(world), shuffle=True)
    wrapped, optimizer, prepared = accelerator.prepare(model, build_optimizer(model), loader)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return Contender(name, False, 1, model, step, _peer_feeds(setting, world, _endless(prepared)))


def _fabric(name: str, setting: Setting, world: samestep.World) -> Contender:
    make_torchvision_importable()  # Lightning imports torchvision where it is installed
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    _set_environment(world)
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=world.size, strategy=strategy)
    fabric.launch()
    model = build_model(setting.model)
    wrapped, optimizer = fabric.setup(model, build_optimizer(model))
    loader = DataLoader(build_dataset(setting.model), batch_size=setting.local_size(world), shuffle=True)
    prepared = fabric.setup_dataloaders(loader)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return Contender(name, False, 1, model, step, _peer_feeds(setting, world, _endless(prepared)))


def _trainer(name: str, setting: Setting, world: samestep.World) -> Contender:
    _set_environment(world)
    model = build_model(setting.model)
    loop = TrainerLoop(model, build_optimizer(model), world)
    sampler: DistributedSampler[Any] = DistributedSampler(build_dataset(setting.model), shuffle=True)
    loader = DataLoader(sampler.dataset, batch_size=setting.local_size(world), sampler=sampler)
    feeds = _peer_feeds(setting, world, _endless(loader, sampler.set_epoch))
    return Contender(name, False, 1, model, loop.step, feeds)


def _set_environment(world: samestep.World) -> None:
    """Set the variables of torchrun: the peers read them and use the existing process group."""
    os.environ |= {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _peer_feeds(setting: Setting, world: samestep.World, loaded: Iterator[Any]) -> dict[Feed, Iterator[Any]]:
    dataset = build_dataset(setting.model)
    start, stop = microbatch_bounds(setting.batch_size, world.size)[world.rank]
    ready = [dataset[indices[start] : indices[stop - 1] + 1] for indices in _ready_indices(setting)]
    return {"ready": cycle(ready), "loader": loaded}


def _ready_indices(setting: Setting) -> list[numpy.ndarray]:
    size = setting.batch_size
    return [numpy.arange(number * size, (number + 1) * size) for number in range(READY)]


def _global_batch(
    dataset: TensorDataset, indices: numpy.ndarray, microbatches: int, world: samestep.World
) -> GlobalBatch:
    bounds = microbatch_bounds(len(indices), microbatches)
    parts = [
        Microbatch(number, stop - start, dataset[indices[start] : indices[stop - 1] + 1])
        for number in owned_microbatches(microbatches, world.size, world.rank)
        for start, stop in [bounds[number]]
    ]
    return GlobalBatch(Cursor(), Cursor(), indices, microbatches, tuple(parts))


def _endless(loader: Iterable[Any], begin_epoch: Callable[[int], None] | None = None) -> Iterator[Any]:
    epoch = 0
    while True:
        if begin_epoch is not None:
            begin_epoch(epoch)
        yield from loader
        epoch += 1
