"""Rank functions for `strategies/test_tensor_parallel.py`: models with a tensor axis."""

import hashlib
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import nn
from torch.distributed import tensor
from torch.distributed.tensor import DTensor

import samestep
from helpers.batches import FIRST_SAMPLE, batch_of, random_batch, random_data
from helpers.models import Root, seeded
from helpers.ten_steps import STEPS, resume_training, steps_of, train
from helpers.tensor_models import PLAN, data_of, model_of, plan_of
from samestep import LossTerm, MultiLoss, StepConfig, World
from samestep.config import MeshConfig, StrategyConfig
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.local_sockets import LocalSockets, Messages
from samestep.engine.engine import Engine
from samestep.errors import InputError, NonFiniteError
from samestep.microbatches import Cursor

BATCH, MICROBATCHES = 20, 3  # the last batch of an epoch has 7 samples
LAYOUTS: dict[str, tuple[int, StrategyConfig]] = {
    "single": (1, StrategyConfig()),
    "tp on 2": (2, StrategyConfig(name="tp")),
    "tp on 4": (4, StrategyConfig(name="tp")),
    "ddp x tp": (4, StrategyConfig(name="ddp", mesh=MeshConfig(replicate=2, tensor=2))),
    "fsdp x tp": (4, StrategyConfig(name="fsdp", mesh=MeshConfig(shard=2, tensor=2))),
    "fsdp": (3, StrategyConfig(name="fsdp")),
}


def build(world: World, model: nn.Module, data: list[Any], **options: Any) -> tuple[Engine, Any, Any]:
    """Return an engine and its data."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    engine = Engine(
        model, optimizer, samestep.cross_entropy, world=world, config=StepConfig(clip_norm=0.5, **options), ema=0.9
    )
    batches = samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
    return engine, batches, samestep.loader(data, batch_size=30, microbatches=MICROBATCHES, world=world)


def train_one(layout: str, model: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train for ten steps, with a checkpoint after five."""
    with samestep.start(device="cpu", strategy=LAYOUTS[layout][1]) as world:
        engine, batches, evaluation = build(
            world, model_of(model), data_of(model), tensor_plan=plan_of(model), **options
        )
        result = train(engine, batches, evaluation, folder / model / layout)
        return {**result, "bits": bits(engine), "sizes": local_sizes(world, engine)}


def train_all(layouts: list[str], models: list[str], folder: Path, **options: Any) -> dict[tuple[str, str], Any]:
    """Train every model with every layout of this number of ranks."""
    return {(layout, model): train_one(layout, model, folder, options) for layout in layouts for model in models}


def losses_on_gpus(layout: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of ten steps."""
    with samestep.start(strategy=LAYOUTS[layout][1]) as world:
        engine, batches, _ = build(world, model_of("layers"), data_of("layers"), tensor_plan=PLAN)
        return steps_of(engine, batches, STEPS)


def resume(layout: str, model: str, checkpoints: Path) -> dict[str, Any]:
    """Compute the second five steps from a checkpoint of any layout."""
    with samestep.start(device="cpu", strategy=LAYOUTS[layout][1]) as world:
        parts = build(world, model_of(model), data_of(model), tensor_plan=plan_of(model))
        return resume_training(*parts, checkpoints)


def resume_all(pairs: list[tuple[str, str]], model: str, folder: Path) -> dict[tuple[str, str], Any]:
    """Resume the checkpoint of the first layout of each pair with the second."""
    return {(before, layout): resume(layout, model, folder / model / before) for before, layout in pairs}


def bits(engine: Engine) -> list[tuple[int, str]]:
    """Return by rank its shard coordinate and a digest of the tensors that are replicated along the tensor axis."""
    own, digest = dict(engine.model.named_parameters()), hashlib.sha256()
    for name, parameter in engine.local_parameters.local.items():
        if not _is_on_tensor_axis(own[name]):
            state = engine.optimizer.state.get(parameter, {})
            for tensor in (parameter.detach(), *state.values()):
                digest.update(tensor.contiguous().numpy().tobytes())
    for buffer in engine.model.buffers():
        digest.update(buffer.contiguous().numpy().tobytes())
    coordinate = engine.world.mesh_shape.coordinates(engine.world.rank)["shard"]
    return [tuple(row) for row in samestep.all_gather([coordinate, digest.hexdigest()], engine.world)]


def _is_on_tensor_axis(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and isinstance(placement, tensor.Shard)
        for name, placement in zip(names, parameter.placements, strict=True)
    )


def local_sizes(world: World, engine: Engine) -> list[int]:
    """Return the number of parameter elements of each rank."""
    return samestep.all_gather(sum(p.numel() for p in engine.local_parameters.local.values()), world)


# --- properties and errors, on 4 ranks -------------------------------------------------------------------------


class Pair(nn.Module):
    """Pair of linear layers with an operation between them."""

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
        if self.between == "random numbers":
            hidden = hidden + torch.rand_like(hidden)
        if self.between == "a mean":
            hidden = hidden - hidden.mean(dim=1, keepdim=True)
        if self.between == "the end":
            outputs: torch.Tensor = hidden
            return outputs
        outputs = self.down(hidden)
        return outputs + 0 * self.norm(self.norm.weight).sum()


PAIR = {"up": "column", "down": "row"}
BETWEEN = ("a norm", "a whole tensor", "random numbers", "a mean", "the end")


def engine_of(world: World, model: nn.Module, loss: Any = samestep.cross_entropy, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    config = StepConfig(**{"tensor_plan": PAIR, **options})
    return Engine(model, optimizer, loss, world=world, config=config)


def run_cases() -> dict[str, Any]:
    """Return the results of all cases with a 2 x 2 mesh."""
    with samestep.start(device="cpu", strategy=LAYOUTS["ddp x tp"][1]) as world:
        results: dict[str, Any] = {"errors": {between: error_of(world, between) for between in BETWEEN}}
        results["weights of rank 0"] = results_of(world)
        results["requests"] = samestep.all_gather(requests(world), world)
        results["terms"] = losses_of_terms(world)
        results["non-finite"] = samestep.all_gather(non_finite_errors(world), world)
        results["skipped"] = samestep.all_gather(skipped_steps(world), world)
        results["sync"] = sync_batch_norm_error(world)
        results["odd"] = odd_slices_error(world)
        results["checkpointing"] = checkpointing_error(world)
        results["heads"] = samestep.all_gather(heads(world), world)
        return results


def run_cases_in_one_process() -> dict[str, Any]:
    """Return the results of the same cases in one process."""
    with samestep.start(device="cpu") as world:
        return {
            "weights of rank 0": results_of(world),
            "terms": losses_of_terms(world),
            "non-finite": [non_finite_errors(world)],
        }


def heads(world: World) -> dict[str, Any]:
    """Return the number of heads on this rank, messages of a step, and errors of dropout variants."""
    counts: list[int] = []
    model = model_of("bert")
    layers = [module for name, module in model.named_modules() if name.endswith("attention.self")]
    engine = engine_of(world, model, tensor_plan={})
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, outputs: counts.append(outputs[0].parts[0].shape[2] // 4))
    inputs, targets = {"input_ids": torch.ones(3, 4, dtype=torch.int64)}, torch.zeros(3, dtype=torch.int64)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    own = (Microbatch(world.data.rank, 3, (inputs, targets)),)
    batch = GlobalBatch(Cursor(), Cursor(0, 6), numpy.arange(6), 2, own)
    with activation_messages() as messages:
        engine.step(batch)
    errors = []
    for change in ({"_attn_implementation": "sdpa"}, {"attention_probs_dropout_prob": 0.0}):
        config = layers[0].config
        for key, value in change.items():
            setattr(config, key, value)
        for layer in layers:
            layer.dropout.p = config.attention_probs_dropout_prob
        try:
            engine.step(batch)
            errors.append("")
        except InputError as error:
            errors.append(error.value)
    return {"heads": counts, "errors": errors, "messages": len(messages)}


ELEMENTS = 3 * 4 * 16  # samples, tokens and width of the activations of a microbatch


@contextmanager
def activation_messages() -> Iterator[list[int]]:
    """Collect the peers of messages with the activations of a microbatch."""
    peers: list[int] = []
    exchange = LocalSockets.exchange

    def counted(sockets: LocalSockets, sent: Messages, received: Messages) -> None:
        peers.extend(peer for tensor, peer in sent if tensor.dim() == 1 and tensor.numel() == ELEMENTS)
        exchange(sockets, sent, received)

    with patch.object(LocalSockets, "exchange", counted):
        yield peers


def error_of(world: World, between: str) -> tuple[str, str, str]:
    try:
        engine_of(world, seeded(0, Pair, between)).step(random_batch(world.data, 12, 4))
    except InputError as error:
        return error.value, str(error.expected), str(error.fix)
    return "", "", ""


def results_of(world: World) -> list[float]:
    """Return losses, with initial weights that differ between ranks."""
    engine = engine_of(world, seeded(world.rank, Pair, ""))
    return [engine.step(random_batch(world.data, 12, 4)).loss for _ in range(3)]


def requests(world: World) -> list[bool]:
    """Request a save on rank 0 in the first step, and a stop on rank 3 in the second step and in evaluation."""
    engine = engine_of(world, seeded(0, Pair, ""))
    first = engine.step(random_batch(world.data, 12, 4), save=world.is_main)
    if world.rank == 3:
        world.context.stop.number = signal.SIGTERM
    second = engine.step(random_batch(world.data, 12, 4))
    is_abandoned = engine.evaluate_until_stop([random_batch(world.data, 12, 4)] * 2) is None
    world.context.stop.number = None
    is_complete = engine.evaluate_until_stop([random_batch(world.data, 12, 4)] * 2) is not None
    return [first.stop, first.save, second.stop, second.save, is_abandoned, is_complete]


def losses_of_terms(world: World) -> list[float]:
    """Return losses with several terms, whose counts are those of the global batch."""
    loss = MultiLoss(
        [
            LossTerm("class", lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum")),
            LossTerm("size", lambda outputs, targets: outputs.square().sum(), weight=0.1),
        ]
    )
    engine = engine_of(world, seeded(0, Pair, ""), loss)
    return [engine.step(random_batch(world.data, 13, 4)).loss for _ in range(3)]


class Rooted(nn.Module):
    """Model with a non-finite gradient for an input of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.root, self.up, self.down = Root(), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(torch.tanh(self.up(self.root(inputs))))
        return outputs


def non_finite_errors(world: World) -> list[str]:
    """Return the errors for a non-finite loss and a non-finite gradient."""
    errors = []
    for number in (math.nan, 0.0):
        inputs, targets = random_data(19)
        inputs[[3, 17], 0] = number
        try:
            engine_of(world, seeded(0, Rooted)).step(batch_of(world.data, inputs, targets, 8))
        except NonFiniteError as error:
            errors.append(error.value)
    assert str(FIRST_SAMPLE + 3) in errors[0]
    return errors


def skipped_steps(world: World) -> tuple[list[bool], float]:
    """Return the skipped steps and the final fp16 scale, from a scale with which the first steps overflow."""
    engine = engine_of(world, seeded(0, Pair, "", dtype=torch.float32), precision="fp16")
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 2.0**24})
    inputs, targets = random_data(12)
    batch = batch_of(world.data, inputs.float(), targets, 4)
    return [engine.step(batch).skipped for _ in range(14)], engine.scaler.get_scale()


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__("")
        self.batch_norm = nn.BatchNorm1d(6)


def checkpointing_error(world: World) -> str:
    try:
        engine_of(world, model_of("bert"), tensor_plan={}, recompute=("*.attention.self",))
    except InputError as error:
        return str(error)
    return ""


def odd_slices_error(world: World) -> tuple[str, str]:
    try:
        engine_of(world, seeded(0, Pair, ""), tensor_slices=3)
    except InputError as error:
        return error.code, error.value
    return "", ""


def sync_batch_norm_error(world: World) -> str:
    try:
        engine_of(world, seeded(0, Normed), batch_norm="sync")
    except InputError as error:
        return str(error)
    return ""
