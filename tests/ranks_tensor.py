"""What ranks run for `parallel_layouts/test_tensor.py`: models of which ranks divide products among them."""

import hashlib
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed import tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from batches import FIRST_SAMPLE, batch_of, random_batch, random_data
from models import Root, seeded
from samestep import LossPart, MultiLoss, StepRules, World
from samestep.config import Mesh, StrategyPart
from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.step import Engine
from samestep.errors import InputError, NonFiniteError
from ten_steps import STEPS, go_on, steps_of, train
from tensor_models import data_of, model_of, plan_of

BATCH, SHARDS = 20, 3  # the last batch of an epoch has 7 samples
LAYOUTS: dict[str, tuple[int, StrategyPart]] = {
    "single": (1, StrategyPart()),
    "tp on 2": (2, StrategyPart(name="tp")),
    "tp on 4": (4, StrategyPart(name="tp")),
    "ddp x tp": (4, StrategyPart(name="ddp", mesh=Mesh(replicate=2, tensor=2))),
    "fsdp x tp": (4, StrategyPart(name="fsdp", mesh=Mesh(shard=2, tensor=2))),
    "fsdp": (3, StrategyPart(name="fsdp")),
}


def part_of(layout: str, plan: dict[str, str]) -> StrategyPart:
    part = LAYOUTS[layout][1]
    return replace(part, plan=plan) if "tp" in layout else part


def made(world: World, model: nn.Module, data: list[Any], **rules: Any) -> tuple[Engine, Any, Any]:
    """An engine and its data."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    engine = Engine(
        model, optimizer, samestep.cross_entropy, world=world, rules=StepRules(clip_norm=0.5, **rules), ema=0.9
    )
    batches = samestep.loader(data, batch_size=BATCH, shards=SHARDS, shuffle=True, world=world)
    return engine, batches, samestep.loader(data, batch_size=30, shards=SHARDS, world=world)


def trained(layout: str, model: str, folder: Path, rules: dict[str, Any]) -> dict[str, Any]:
    """Ten steps, with a checkpoint after five."""
    with samestep.start(device="cpu", strategy=part_of(layout, plan_of(model))) as world:
        engine, batches, evaluation = made(world, model_of(model), data_of(model), **rules)
        found = train(engine, batches, evaluation, folder / model / layout)
        return {**found, "bits": bits(engine), "held": held_by(world, engine)}


def all_trained(layouts: list[str], models: list[str], folder: Path, **rules: Any) -> dict[tuple[str, str], Any]:
    """Every model under every layout of as many ranks."""
    return {(layout, model): trained(layout, model, folder, rules) for layout in layouts for model in models}


def losses_on_gpus(layout: str) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of ten steps."""
    with samestep.start(strategy=part_of(layout, plan_of("layers"))) as world:
        engine, batches, _ = made(world, model_of("layers"), data_of("layers"))
        return steps_of(engine, batches, STEPS)


def gone_on(layout: str, model: str, checkpoints: Path) -> dict[str, Any]:
    """The second five steps, from a checkpoint that some layout saved."""
    with samestep.start(device="cpu", strategy=part_of(layout, plan_of(model))) as world:
        return go_on(*made(world, model_of(model), data_of(model)), checkpoints)


def all_gone_on(pairs: list[tuple[str, str]], model: str, folder: Path) -> dict[tuple[str, str], Any]:
    """From what the first of each pair has saved, under the second."""
    return {(before, layout): gone_on(layout, model, folder / model / before) for before, layout in pairs}


def bits(engine: Engine) -> list[tuple[int, str]]:
    """By rank: its place on the shard axis, and a digest of what all ranks of a tensor axis must have alike."""
    own, digest = dict(engine.model.named_parameters()), hashlib.sha256()
    for name, held in engine.pieces.held.items():
        if not _is_on_tensor_axis(own[name]):
            state = engine.optimizer.state.get(held, {})
            for tensor in (held.detach(), *state.values()):
                digest.update(tensor.contiguous().numpy().tobytes())
    for buffer in engine.model.buffers():
        digest.update(buffer.contiguous().numpy().tobytes())
    place = engine.world.layout.place(engine.world.rank)["shard"]
    return [tuple(said) for said in samestep.all_gather([place, digest.hexdigest()], engine.world)]


def _is_on_tensor_axis(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and isinstance(placement, tensor.Shard)
        for name, placement in zip(names, parameter.placements, strict=True)
    )


def held_by(world: World, engine: Engine) -> list[int]:
    """How many elements each rank holds."""
    return samestep.all_gather(sum(p.numel() for p in engine.pieces.held.values()), world)


# --- one question each, on 4 ranks -------------------------------------------------------------------------


class Pair(nn.Module):
    """A pair of products with something that can be wrong between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.between = between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs)
        if self.between == "a norm":
            hidden = self.norm(hidden)
        if self.between == "a whole tensor":
            hidden = hidden + torch.ones(8, dtype=hidden.dtype)
        if self.between == "functional dropout":
            hidden = nn.functional.dropout(hidden, 0.2, training=self.training)
        if self.between == "a mean":
            hidden = hidden - hidden.mean(dim=1, keepdim=True)
        if self.between == "the end":
            outputs: torch.Tensor = hidden
            return outputs
        outputs = self.down(hidden)
        return outputs + 0 * self.norm(self.norm.weight).sum()


PAIR = {"up": "column", "down": "row"}
BETWEEN = ("a norm", "a whole tensor", "functional dropout", "the end")


def engine_of(world: World, model: nn.Module, loss: Any = samestep.cross_entropy, **rules: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Engine(model, optimizer, loss, world=world, rules=StepRules(**rules))


def questions() -> dict[str, Any]:
    """What each check below says, of a 2 x 2 layout."""
    part = replace(LAYOUTS["ddp x tp"][1], plan=PAIR)
    with samestep.start(device="cpu", strategy=part) as world:
        found = {"refused": {between: refused(world, between) for between in BETWEEN}}
        found["a mean"] = [result_of(world, "a mean")]
        found["asked"] = samestep.all_gather(asked_to_end(world), world)
        found["parts"] = parts(world)
        found["stopped"] = samestep.all_gather(stopped(world), world)
        found["scaled"] = samestep.all_gather(scaled(world), world)
        found["sync"] = refused_sync(world)
        found["again"] = refused_again(world)
        found["heads"] = samestep.all_gather(heads(world), world)
        return found


def alone() -> dict[str, Any]:
    """What one process says to the same."""
    with samestep.start(device="cpu") as world:
        return {
            "a mean": [result_of(world, "a mean")],
            "parts": parts(world),
            "stopped": [stopped(world)],
        }


def heads(world: World) -> dict[str, Any]:
    """How many heads a rank computes, and what is said of dropout that would be drawn for a part."""
    seen: list[int] = []
    model = model_of("bert")
    world.strategy = replace(world.strategy, plan={})
    layers = [module for name, module in model.named_modules() if name.endswith("attention.self")]
    engine = engine_of(world, model)
    for layer in layers:
        layer.register_forward_hook(lambda module, given, found: seen.append(found[0].to_local().shape[2] // 4))
    inputs, targets = {"input_ids": torch.ones(3, 4, dtype=torch.int64)}, torch.zeros(3, dtype=torch.int64)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    batch = GlobalBatch(Cursor(), Cursor(0, 3), numpy.arange(3), 1, (Shard(0, 3, (inputs, targets)),))
    with _Messages() as messages:
        engine.step(batch)
    said = []
    for change in ({"_attn_implementation": "sdpa"}, {"attention_probs_dropout_prob": 0.0}):
        config = layers[0].config
        for key, value in change.items():
            setattr(config, key, value)
        for layer in layers:
            layer.dropout.p = config.attention_probs_dropout_prob
        try:
            engine.step(batch)
            said.append("")
        except InputError as error:
            said.append(error.value)
    return {"seen": seen, "said": said, "messages": messages.counts}


class _Messages(TorchDispatchMode):
    """Counts what goes from rank to rank while a model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "all" in func.name():
            self.counts[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def refused(world: World, between: str) -> tuple[str, str, str]:
    try:
        engine_of(world, seeded(0, Pair, between)).step(random_batch(world.data, 12, 4))
    except InputError as error:
        return error.value, str(error.rule), str(error.do)
    return "", "", ""


def result_of(world: World, between: str) -> list[float]:
    """Losses where what is between is no function of single elements, and torch knows how it is divided.

    The models of ranks begin with different weights.
    """
    engine = engine_of(world, seeded(world.rank, Pair, between))
    return [engine.step(random_batch(world.data, 12, 4)).loss for _ in range(3)]


def asked_to_end(world: World) -> list[bool]:
    """Rank 3 is asked to end before the second step, and in an evaluation; rank 0 wants a save after the first."""
    asked: list[bool] = []
    before = world._stop_requested
    world._stop_requested = lambda: bool(asked) and world.rank == 3
    try:
        engine = engine_of(world, seeded(0, Pair, ""))
        first = engine.step(random_batch(world.data, 12, 4), save=world.is_main)
        asked.append(True)
        second = engine.step(random_batch(world.data, 12, 4))
        given_up = engine.evaluate_until_stop([random_batch(world.data, 12, 4)] * 2) is None
        asked.clear()
        whole = engine.evaluate_until_stop([random_batch(world.data, 12, 4)] * 2) is not None
    finally:
        world._stop_requested = before
    return [first.stop, first.save, second.stop, second.save, given_up, whole]


def parts(world: World) -> list[float]:
    """Losses of several parts, whose counts are those of the global batch."""
    loss = MultiLoss(
        [
            LossPart("class", lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum")),
            LossPart("size", lambda outputs, targets: outputs.square().sum(), weight=0.1),
        ]
    )
    engine = engine_of(world, seeded(0, Pair, ""), loss)
    return [engine.step(random_batch(world.data, 13, 4)).loss for _ in range(3)]


class Rooted(nn.Module):
    """Where an input is zero, its gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.root, self.up, self.down = Root(), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(torch.tanh(self.up(self.root(inputs))))
        return outputs


def stopped(world: World) -> list[str]:
    """What steps say to a loss and to a gradient that is not finite."""
    said = []
    for number in (math.nan, 0.0):
        inputs, targets = random_data(19)
        inputs[[3, 17], 0] = number
        try:
            engine_of(world, seeded(0, Rooted)).step(batch_of(world.data, inputs, targets, 8))
        except NonFiniteError as error:
            said.append(error.value)
    assert str(FIRST_SAMPLE + 3) in said[0]
    return said


def scaled(world: World) -> tuple[list[bool], float]:
    """Which steps are skipped under fp16 from a scale so large that the first ones overflow."""
    engine = engine_of(world, seeded(0, Pair, "", dtype=torch.float32), precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**24})
    inputs, targets = random_data(12)
    batch = batch_of(world.data, inputs.float(), targets, 4)
    return [engine.step(batch).skipped for _ in range(14)], engine.scaler.get_scale()


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__("")
        self.batch_norm = nn.BatchNorm1d(6)


def refused_again(world: World) -> str:
    world.strategy = replace(world.strategy, plan={})
    try:
        engine_of(world, model_of("bert"), recompute=("*.attention.self",))
    except InputError as error:
        return str(error)
    return ""


def refused_sync(world: World) -> str:
    try:
        engine_of(world, seeded(0, Normed), batch_norm="sync")
    except InputError as error:
        return str(error)
    return ""
