"""What ranks run for `parallel_layouts/test_sharded.py`."""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from ranks_layouts import Full
from samestep.config import Precision, StepRules, StrategyPart
from samestep.errors import SamestepError

SAMPLES, STEPS = 60, 6
FSDP = StrategyPart(name="fsdp")


class Exploding(nn.Linear):
    """Its gradient overflows in steps in which an input is larger than 50, and there alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs * torch.where(inputs.abs().max() > 50, torch.inf, 1.0) if self.training else outputs


def data(largest: float = 1.0) -> TensorDataset:
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1))
    inputs[25] *= largest / inputs[25].abs().max()
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def trained(part: StrategyPart | None, precision: Precision) -> dict[str, Any]:
    """Some steps of float32 weights in a precision; losses, the scale, and the weights of every rank."""
    with samestep.start(device="cpu", strategy=part) as world:
        torch.manual_seed(0)
        model = Full()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rules = StepRules(precision=precision, clip_norm=1.0)
        engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, rules=rules)
        batches = samestep.loader(data(), batch_size=20, shards=5, world=world)
        losses = []
        while engine.steps < STEPS:
            losses += [engine.step(batch).loss for batch in batches]
        weights = {name: engine.pieces.whole(name, p.detach()).tolist() for name, p in engine.pieces.held.items()}
        return {"losses": losses, "scale": engine.scaler.get_scale(), "weights": samestep.all_gather(weights, world)}


def precisions() -> dict[str, dict[str, Any]]:
    """Every precision under fsdp."""
    chosen: dict[str, tuple[StrategyPart, Precision]] = {
        "fp32": (FSDP, "fp32"),
        "bf16": (FSDP, "bf16"),
        "fp16": (FSDP, "fp16"),
        "gathered in bf16": (StrategyPart(name="fsdp", gather="bf16"), "fp32"),
    }
    return {name: trained(*each) for name, each in chosen.items()}


def scales() -> list[list[float]]:
    """By how much every rank changes the scale: after a sound step, and after an overflow in one rank's part."""
    found = []
    with samestep.start(device="cpu", strategy=FSDP) as world:
        engine = engine_of(world, Full(), precision="fp16", non_finite="skip")
        for batch in samestep.loader(data(), batch_size=20, shards=5, world=world):
            engine.step(batch)
        for odd in (None, 2):
            before = engine.scaler.get_scale()
            for piece in engine.pieces.trained.values():
                piece.grad = torch.full_like(piece, torch.inf if world.rank == odd else 0.0)
            engine.scaler.unscale_(engine.optimizer)
            engine.pieces.agree_on_overflow(engine.scaler, engine.optimizer, world)
            engine.scaler.update()
            found.append(samestep.all_gather(engine.scaler.get_scale() / before, world))
    return found


def alone() -> dict[str, dict[str, Any]]:
    """The same on one process."""
    names: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    return {name: trained(None, name) for name in names}


def engine_of(
    world: samestep.World, model: nn.Module, optimizer: Any = torch.optim.SGD, **more: Any
) -> samestep.Engine:
    rules = StepRules(**more)
    made = optimizer(model.parameters(), lr=0.1)
    return samestep.Engine(model, made, nn.CrossEntropyLoss(), world=world, rules=rules)


def refused() -> dict[str, list[str]]:
    """What every rank is told of what cannot be."""
    told: dict[str, list[str]] = {}

    def note(name: str, make: Any) -> None:
        try:
            make()
        except SamestepError as error:
            told[name] = [f"{error.value}|{error.do}"]
        told[name] = samestep.all_gather(told.get(name, ["nothing"])[0], world)

    with samestep.start(device="cpu", strategy=FSDP) as world:
        note("optimizer", lambda: engine_of(world, nn.Linear(12, 4), torch.optim.Adafactor))
        norms = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        note("batch norm", lambda: engine_of(world, norms, batch_norm="sync"))
        for name, chosen in (("skip", "skip"), ("stop", "stop")):
            model = nn.Sequential(nn.Linear(12, 8), Exploding(8, 8), nn.Linear(8, 4))
            engine = engine_of(world, model, non_finite=chosen)
            with torch.no_grad():
                for piece in engine.pieces.held.values():
                    piece.clamp_(-0.5, 0.5)
            batches = samestep.loader(data(10_000.0), batch_size=20, shards=5, world=world)
            note(name, lambda engine=engine, batches=batches: [engine.step(batch) for batch in batches])
            told[f"{name}: steps"] = samestep.all_gather(str(engine.steps), world)
    with samestep.start(device="cpu", strategy=StrategyPart(name="fsdp", meta=True)) as world:
        tied = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        tied[1].weight = tied[0].weight
        note("tied", lambda: engine_of(world, tied))
    return told


def without_values() -> None:
    """Rank 0 alone sees that there are none."""
    with samestep.start(device="cpu", strategy=StrategyPart(name="fsdp", meta=True)) as world:
        engine_of(world, nn.Linear(12, 4, device="meta"))


def states() -> list[bool]:
    """Whether a model divided on a rank holds no more than its part, and computes with the whole."""
    with samestep.start(device="cpu", strategy=FSDP) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
        whole = copy.deepcopy(model)
        engine = engine_of(world, model)
        inputs = data().tensors[0]
        with torch.no_grad():
            same = torch.allclose(engine.model(inputs), whole(inputs), atol=1e-6)
        held = sum(piece.numel() for piece in engine.pieces.held.values())
        return samestep.all_gather([same, held < sum(p.numel() for p in whole.parameters()) / 2], world)
