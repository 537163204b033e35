"""Rank functions for `strategies/test_tensor_slices.py`: bits of runs with slices of matrix products."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch

import samestep
from helpers.batches import random_batch
from helpers.models import seeded
from helpers.tensor_models import data_of, model_of, plan_of
from samestep import StepConfig
from samestep.config import MeshConfig, StrategyConfig
from workers.tensor import PAIR, Pair

BATCH, MICROBATCHES = 24, 4  # the last batch of an epoch has 23 samples
# Ranks and strategy by name.
LAYOUTS: dict[str, tuple[int, StrategyConfig]] = {
    "single": (1, StrategyConfig()),
    "ddp": (2, StrategyConfig(name="ddp")),
    "fsdp": (2, StrategyConfig(name="fsdp")),
    "tp": (2, StrategyConfig(name="tp")),
    "tp (3)": (3, StrategyConfig(name="tp")),
    "tp (4)": (4, StrategyConfig(name="tp")),
    "ddp (4)": (4, StrategyConfig(name="ddp")),
    "hsdp": (4, StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2))),
    "ddp x tp": (4, StrategyConfig(name="ddp", mesh=MeshConfig(replicate=2, tensor=2))),
    "pp": (2, StrategyConfig(name="pp")),
    "pp x tp": (4, StrategyConfig(name="pp", mesh=MeshConfig(pipeline=2, tensor=2))),
    "fsdp x tp": (4, StrategyConfig(name="fsdp", mesh=MeshConfig(shard=2, tensor=2))),
}


def digests(
    layouts: list[str], model: str, slices: int, folder: str, *, epochs: int = 2, begin: str = "", **options: Any
) -> dict[str, str]:
    """Train in float32 with each layout; return digests of the results and of the losses of the last epoch.

    Results are weights, optimizer state, average, buffers and metrics. Writes a checkpoint to the folder of the layout;
    `begin` is the layout whose checkpoint the run resumes.
    """
    return {layout: _digest(layout, model, slices, Path(folder), epochs, begin, options) for layout in layouts}


def _digest(
    layout: str, model: str, slices: int, folder: Path, epochs: int, begin: str, options: dict[str, Any]
) -> str:
    with samestep.start(device="cpu", strategy=LAYOUTS[layout][1]) as world:
        net = model_of(model).float()
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        config = StepConfig(clip_norm=0.5, tensor_slices=slices, tensor_plan=plan_of(model), **options)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world, config=config, ema=0.9)
        data = [(_float(inputs), target) for inputs, target in data_of(model)]
        batches = samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
        manager = samestep.CheckpointManager(folder / (begin or layout), engine, batches)
        if begin:
            assert manager.resume()
        first = batches.cursor.epoch
        for _ in range(first, epochs):
            result = hashlib.sha256()
            for batch in batches:
                step = engine.step(batch)
                result.update(f"{step.loss.hex()} {step.grad_norm.hex()}".encode())
        samestep.CheckpointManager(folder / layout, engine, batches).save()
        values = engine.evaluate(samestep.loader(data, batch_size=30, microbatches=MICROBATCHES, world=world))
        result.update(repr(values).encode())
        for tensor in full_tensors(engine):
            result.update(tensor.contiguous().numpy().tobytes())
        for buffer in engine.model.buffers():
            result.update(buffer.contiguous().numpy().tobytes())
    return result.hexdigest()


def full_tensors(engine: samestep.Engine) -> list[torch.Tensor]:
    """Return parameters with optimizer state and average, each on every rank. A collective."""
    parameters, average = engine.local_parameters, engine.averaged
    assert average is not None
    own: dict[str, dict[str, Any]] = {}
    for name, local in parameters.local.items():
        if not local.is_meta:
            own[name] = {"": local.detach(), **engine.optimizer.state.get(local, {})}
            own[name] |= {"average": average.tensors[name]} if name in average.tensors else {}
    merged = parameters.merge_metadata(own)
    return [parameters.full_tensor(name, value) for name in sorted(merged) for _, value in sorted(merged[name].items())]


def _float(inputs: Any) -> Any:
    is_double = isinstance(inputs, torch.Tensor) and inputs.dtype == torch.float64
    return inputs.float() if is_double else inputs


def of_replaced_parameters() -> tuple[float, float, dict[str, str]]:
    """Replace a layer between two steps; return both losses, and the classes of the forwards of the layers."""
    with samestep.start(device="cpu") as world:
        model = seeded(0, Pair, "")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = StepConfig(tensor_slices=4, tensor_plan=PAIR)
        engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
        before = engine.step(random_batch(world, 12, 4)).loss
        model.down = torch.nn.Linear(8, 4, dtype=torch.float64)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        after = engine.step(random_batch(world, 12, 4)).loss
        copy.deepcopy(model)
        return before, after, {name: type(getattr(model, name).forward).__name__ for name in PAIR}
