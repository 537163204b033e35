"""Rank functions for `conformance/test_layouts.py`: the same training with every strategy and mesh."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.ten_steps import STEPS, outcome, resume_training, steps_of, train
from samestep.config import MeshConfig, StepConfig, StrategyConfig
from samestep.engine.checksum import state_checksum

World = samestep.World
MICROBATCHES, BATCH, SAMPLES = 5, 20, 91  # microbatches of 4 samples; the last batch of an epoch has 11

LAYOUTS: dict[str, tuple[int, StrategyConfig]] = {
    "ddp": (4, StrategyConfig(name="ddp")),
    "fsdp": (4, StrategyConfig(name="fsdp")),
    "fsdp (offload)": (2, StrategyConfig(name="fsdp", offload=True)),
    "fsdp (meta)": (4, StrategyConfig(name="fsdp", meta=True)),
    "hsdp": (4, StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2))),
    "fsdp (3)": (3, StrategyConfig(name="fsdp")),
    "dp": (1, StrategyConfig(name="dp", devices=3)),
    "device_map": (1, StrategyConfig(name="device_map", devices=2)),
    "ddp x device_map": (2, StrategyConfig(name="device_map", devices=2)),
    "tp": (2, StrategyConfig(name="tp")),
    "tp (4)": (4, StrategyConfig(name="tp")),
    "ddp x tp": (4, StrategyConfig(name="ddp", mesh=MeshConfig(tensor=2))),
    "pp": (2, StrategyConfig(name="pp")),
    "ddp x pp": (4, StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2))),
    "pp x tp": (4, StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2, tensor=2))),
    "fsdp x tp": (4, StrategyConfig(name="fsdp", mesh=MeshConfig(tensor=2))),
}
# On eight ranks, with at least as many microbatches as ranks that share the data.
EIGHT_RANKS: dict[str, tuple[int, StrategyConfig]] = {
    "ddp (8)": (8, StrategyConfig(name="ddp")),
    "fsdp (8)": (8, StrategyConfig(name="fsdp")),
    "hsdp (8)": (8, StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=4))),
    "fsdp x tp (8)": (8, StrategyConfig(name="fsdp", mesh=MeshConfig(tensor=2))),
    "ddp x pp (8)": (8, StrategyConfig(name="pp", mesh=MeshConfig(pipeline=4))),
    "ddp x pp x tp (8)": (8, StrategyConfig(name="pp", mesh=MeshConfig(replicate=2, pipeline=2, tensor=2))),
}
# By model: plan of the tensor axis, and device map.
PLANS = {
    "chain": {"0": "column", "2": "row", "4": "column", "6": "row"},
    "full": {"first": "column_gathered", "blocks.*": "column_gathered", "last": "row"},
}
DEVICE_MAPS = {"chain": {}, "full": {"first": 0, "norm": 0, "frozen": 0, "blocks*": 1, "drop": 1, "last": 1}}


class Chain(nn.Sequential):
    """Model that every layout can divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.extend([nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)])


class Full(nn.Module):
    """Model with batch norm, dropout, a list of blocks, a frozen layer and a weight that is used twice."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.first(inputs)))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = self.drop(torch.tanh(block(hidden)))
        logits: torch.Tensor = self.last(hidden)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "full": Full}
LAYOUTS_OF_MODEL = {model: list(LAYOUTS) for model in MODELS}


def build(world: World, model: str, precision: str = "fp64") -> tuple[samestep.Engine, Any, Any]:
    """Return an engine and its data, in float64 or in a precision of `StepConfig`."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    torch.manual_seed(0)
    with torch.device("meta") if world.strategy.meta and world.rank else nullcontext():
        net = MODELS[model]().to(dtype)
    decayed = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in net.parameters() if p.dim() == 1 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others}]
    # Momentum, to have optimizer state. Adam would turn the rounding of a zero gradient into a full step.
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    config = StepConfig(
        clip_norm=0.4,
        precision="fp32" if precision == "fp64" else precision,  # type: ignore[arg-type]
        tensor_plan=PLANS[model],
    )
    engine = samestep.Engine(net, optimizer, nn.CrossEntropyLoss(), world=world, config=config, ema=0.9)
    microbatches = max(MICROBATCHES, world.mesh_shape.data_size)
    batches = samestep.loader(data, batch_size=BATCH, microbatches=microbatches, shuffle=True, world=world)
    return engine, batches, samestep.loader(data, batch_size=30, microbatches=microbatches, world=world)


def strategy_for(name: str, model: str) -> StrategyConfig | None:
    """Return the strategy of a layout with its options for a model."""
    if name == "single":
        return None
    strategy = (LAYOUTS | EIGHT_RANKS)[name][1]
    return replace(strategy, place=DEVICE_MAPS[model]) if strategy.name == "device_map" else strategy


def train_one(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Train for ten steps, with a checkpoint after five; also return the number of local elements."""
    with samestep.start(device="cpu", strategy=strategy_for(name, model)) as world:
        engine, batches, evaluation = build(world, model)
        result = train(engine, batches, evaluation, folder / name)
        checksum = state_checksum(engine, batches.cursor)
        return {**result, "checksum": checksum, "size": sum(p.numel() for p in engine.local_parameters.local.values())}


def in_precision(names: list[str], precision: str) -> dict[str, dict[str, Any]]:
    """Return the results of ten steps in another precision, for several layouts."""
    results = {}
    for name in names:
        with samestep.start(device="cpu", strategy=strategy_for(name, "chain")) as world:
            engine, batches, evaluation = build(world, "chain", precision)
            results[name] = {"steps": steps_of(engine, batches, STEPS), **outcome(engine, evaluation)}
    return results


def resume(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Compute the second five steps from a checkpoint of another layout."""
    with samestep.start(device="cpu", strategy=strategy_for(name, model)) as world:
        return resume_training(*build(world, model), folder)


def loaded_checksums(names: list[str], model: str, folder: Path) -> dict[str, int | None]:
    """Return the checksum of the state of a checkpoint in several layouts of this number of ranks."""
    checksums = {}
    for name in names:
        with samestep.start(device="cpu", strategy=strategy_for(name, model)) as world:
            engine, batches, _ = build(world, model)
            assert samestep.CheckpointManager(folder, engine, batches).resume()
            checksums[name] = state_checksum(engine, batches.cursor)
    return checksums


def train_all(names: list[str], model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with several layouts of this number of ranks."""
    return {name: train_one(name, model, folder) for name in names}


def resume_all(names: list[str], model: str, folder: Path, saved: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Resume the checkpoints of some layouts with several layouts of this number of ranks."""
    return {(before, name): resume(name, model, folder / before) for name in names for before in saved}
