"""What ranks run for `conformance/test_layouts.py`: the same training under every layout."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.config import Mesh, StepRules, StrategyPart
from ten_steps import STEPS, go_on, outcome, steps_of, train

World = samestep.World
SHARDS, BATCH, SAMPLES = 5, 20, 91  # shards of 4 samples; the last batch of an epoch has 11

LAYOUTS: dict[str, tuple[int, StrategyPart]] = {
    "ddp": (4, StrategyPart(name="ddp")),
    "fsdp": (4, StrategyPart(name="fsdp")),
    "fsdp (offload)": (2, StrategyPart(name="fsdp", offload=True)),
    "fsdp (meta)": (4, StrategyPart(name="fsdp", meta=True)),
    "hsdp": (4, StrategyPart(name="hsdp", mesh=Mesh(replicate=2, shard=2))),
    "fsdp (3)": (3, StrategyPart(name="fsdp")),
    "dp": (1, StrategyPart(name="dp", devices=3)),
    "placed": (1, StrategyPart(name="placed", devices=2)),
    "ddp x placed": (2, StrategyPart(name="placed", devices=2)),
    "tp": (2, StrategyPart(name="tp")),
    "tp (4)": (4, StrategyPart(name="tp")),
    "ddp x tp": (4, StrategyPart(name="ddp", mesh=Mesh(tensor=2))),
    "pp": (2, StrategyPart(name="pp")),
    "ddp x pp": (4, StrategyPart(name="pp", mesh=Mesh(pipeline=2))),
    "pp x tp": (4, StrategyPart(name="pp", mesh=Mesh(pipeline=2, tensor=2))),
    "fsdp x tp": (4, StrategyPart(name="fsdp", mesh=Mesh(tensor=2))),
}
# On eight ranks; where each has data of its own, there are as many shards.
OF_EIGHT: dict[str, tuple[int, StrategyPart]] = {
    "ddp (8)": (8, StrategyPart(name="ddp")),
    "fsdp (8)": (8, StrategyPart(name="fsdp")),
    "hsdp (8)": (8, StrategyPart(name="hsdp", mesh=Mesh(replicate=2, shard=4))),
    "fsdp x tp (8)": (8, StrategyPart(name="fsdp", mesh=Mesh(tensor=2))),
    "ddp x pp (8)": (8, StrategyPart(name="pp", mesh=Mesh(pipeline=4))),
    "ddp x pp x tp (8)": (8, StrategyPart(name="pp", mesh=Mesh(replicate=2, pipeline=2, tensor=2))),
}
# By model: how a tensor axis divides its products, and where its parts lie.
PLANS = {
    "chain": {"0": "column", "2": "row", "4": "column", "6": "row"},
    "full": {"first": "column_gathered", "blocks.*": "column_gathered", "last": "row"},
}
PLACES = {"chain": {}, "full": {"first": 0, "norm": 0, "frozen": 0, "blocks*": 1, "drop": 1, "last": 1}}


class Chain(nn.Sequential):
    """What any layout can divide."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.extend([nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)])


class Full(nn.Module):
    """Batch norm, dropout, blocks in a list, a frozen layer and a weight that is used twice."""

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


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": Chain, "full": Full, "without dropout": partial(Full, 0.0)}
# Stages draw masks of their own, so those of one process are not theirs.
OF_MODEL = {
    "chain": list(LAYOUTS),
    "full": [name for name in LAYOUTS if "pp" not in name],
    "without dropout": [name for name in LAYOUTS if "pp" in name],
}


def made(world: World, model: str, precision: str = "fp64") -> tuple[samestep.Engine, Any, Any]:
    """An engine and its data, in float64 or by one of the precisions of a step."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    torch.manual_seed(0)
    with torch.device("meta") if world.strategy.meta and world.rank else nullcontext():
        net = MODELS[model]().to(dtype)
    decayed = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in net.parameters() if p.dim() == 1 and p.requires_grad]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others}]
    # Momentum, so that there is state; not Adam, which makes of the rounding of a gradient that is zero a whole step.
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    rules = StepRules(clip_norm=0.4, precision="fp32" if precision == "fp64" else precision)  # type: ignore[arg-type]
    engine = samestep.Engine(net, optimizer, nn.CrossEntropyLoss(), world=world, rules=rules, ema=0.9)
    shards = max(SHARDS, world.layout.data)
    batches = samestep.loader(data, batch_size=BATCH, shards=shards, shuffle=True, world=world)
    return engine, batches, samestep.loader(data, batch_size=30, shards=shards, world=world)


def part_for(name: str, model: str) -> StrategyPart | None:
    """The strategy of a layout, with what it has to know of a model."""
    if name == "single":
        return None
    part = (LAYOUTS | OF_EIGHT)[name][1]
    if part.name == "placed":
        return replace(part, place=PLACES[model])
    return replace(part, plan=PLANS["chain" if model == "chain" else "full"]) if "tp" in name else part


def trained(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Ten steps under a layout, with a checkpoint after five; how much this rank holds."""
    with samestep.start(device="cpu", strategy=part_for(name, model)) as world:
        engine, batches, evaluation = made(world, model)
        found = train(engine, batches, evaluation, folder / name)
        return {**found, "held": sum(p.numel() for p in engine.pieces.held.values())}


def in_precision(names: list[str], precision: str) -> dict[str, dict[str, Any]]:
    """What ten steps lead to under every layout of as many ranks, in another precision."""
    found = {}
    for name in names:
        with samestep.start(device="cpu", strategy=part_for(name, "chain")) as world:
            engine, batches, evaluation = made(world, "chain", precision)
            found[name] = {"steps": steps_of(engine, batches, STEPS), **outcome(engine, evaluation)}
    return found


def gone_on(name: str, model: str, folder: Path) -> dict[str, Any]:
    """The second five steps under a layout, from a checkpoint that another one saved."""
    with samestep.start(device="cpu", strategy=part_for(name, model)) as world:
        return go_on(*made(world, model), folder)


def all_trained(names: list[str], model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Every layout of as many ranks, one after the other."""
    return {name: trained(name, model, folder) for name in names}


def all_gone_on(names: list[str], model: str, folder: Path, saved: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Every layout of as many ranks, from what each layout has saved."""
    return {(before, name): gone_on(name, model, folder / before) for name in names for before in saved}
