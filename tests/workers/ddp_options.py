"""Rank functions for `strategies/test_ddp_options.py`."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Picky, seeded
from samestep.config import MeshConfig, StepConfig, StrategyConfig
from samestep.errors import PeerLostError, UnusedParameterError
from samestep.microbatches import microbatch_bounds
from samestep.strategies.fast_reduction import compressed_all_reduce
from samestep.strategies.reduction import flatten
from workers.loader import gathered

MICROBATCHES, BATCH, SAMPLES, STEPS = 8, 24, 96, 10
RANKS = 4
OPTIONS: dict[str, StrategyConfig] = {
    "plain": StrategyConfig(),
    "1 MB": StrategyConfig(bucket_mb=1),
    "25 MB": StrategyConfig(bucket_mb=25),
    "many buckets": StrategyConfig(bucket_mb=0.02),
    "fp16": StrategyConfig(hook="fp16"),
    "fp16, many buckets": StrategyConfig(hook="fp16", bucket_mb=0.02),
    "bf16": StrategyConfig(hook="bf16"),
}
DIVIDED: dict[str, StrategyConfig] = {
    "tp": StrategyConfig(name="ddp", mesh=MeshConfig(tensor=2)),
    "pp": StrategyConfig(name="ddp", mesh=MeshConfig(pipeline=2)),
}
DIVIDED |= {f"{name} fp16": replace(part, hook="fp16") for name, part in DIVIDED.items()}


class Net(nn.Module):
    """Network with batch norm, dropout and residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 64), nn.BatchNorm1d(64)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(64, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + self.drop(torch.tanh(block(hidden)))
        logits: torch.Tensor = self.last(hidden)
        return logits


def train(option: str) -> dict[str, Any]:
    """Train for some steps with an option; return losses, weights and their hash."""
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    with samestep.start(device="cpu", strategy={**OPTIONS, **DIVIDED}[option]) as world:
        net = seeded(0, Net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        config = StepConfig(clip_norm=0.5, tensor_plan={"blocks.*": "column_gathered"})
        engine = samestep.Engine(net, optimizer, nn.CrossEntropyLoss(), world=world, config=config, ema=0.9)
        batches = samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world)
        steps = []
        while engine.steps < STEPS:
            steps += [engine.step(batch) for batch in batches]
        values = engine.evaluate(samestep.loader(data, batch_size=20, microbatches=MICROBATCHES, world=world))
        local = engine.local_parameters.local
        weights = {name: p.detach().clone() for name, p in local.items() if not p.is_meta}
        return {
            "steps": [(step.loss, step.grad_norm) for step in steps],
            "evaluation": values,
            "weights": weights,
            "bits": hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest(),
        }


def train_all() -> dict[str, list[dict[str, Any]]]:
    """Train with every option; return the results by option and rank."""
    results = {option: train(option) for option in OPTIONS}
    with samestep.start(device="cpu") as world:
        return {option: gathered(result) for option, result in results.items()} if world.size > 1 else {}


def train_divided() -> dict[str, list[tuple[float, float]]]:
    """Train replicas of a divided model; return loss and gradient norm of each step."""
    return {name: train(name)["steps"] for name in DIVIDED}


def gradients_of(rank: int, dtype: torch.dtype, size: float) -> torch.Tensor:
    """Return gradients of a rank with magnitudes around `size`."""
    generator = torch.Generator().manual_seed(rank)
    spread = 10 ** (2 * torch.randn(1000, generator=generator, dtype=torch.float64).clamp(-1, 1))
    return (size * spread * torch.randn(1000, generator=generator, dtype=torch.float64)).to(dtype)


def sums_16_bit() -> list[dict[str, Any]]:
    """Return 16-bit sums of finite and non-finite numbers, by rank."""
    sums: dict[str, Any] = {}
    with samestep.start(device="cpu") as world:
        for name in ("float16", "bfloat16"):
            for size in (1e-12, 1e-6, 1.0, 1e9):
                sums[f"{name} {size:g}"] = compressed_all_reduce(
                    world, gradients_of(world.rank, torch.float32, size), getattr(torch, name)
                )
            for value in (torch.inf, torch.nan):
                numbers = gradients_of(world.rank, torch.float32, 1.0)
                if world.rank == 1:
                    numbers[3] = value
                sums[f"{name} {value}"] = compressed_all_reduce(world, numbers, getattr(torch, name))
            sums[f"{name} zero"] = compressed_all_reduce(world, torch.zeros(5), getattr(torch, name))
        return gathered(sums)


def unused_parameter(part: StrategyConfig) -> None:
    """Compute a second step in which the last microbatch of one rank does not use a layer."""
    inputs, targets = random_data(2 * MICROBATCHES)
    inputs[:, 0] = 1
    with samestep.start(device="cpu", strategy=part) as world:
        net = seeded(0, Picky)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world)
        engine.step(batch_of(world, inputs, targets, MICROBATCHES))
        inputs[10:12, 0] = -1
        engine.step(batch_of(world, inputs, targets, MICROBATCHES))


def wait_for_missing_rank(kind: str) -> None:
    """Let rank 0 wait for rank 1, which sleeps, in a group of the mesh."""
    part = StrategyConfig(name="hsdp", mesh=MeshConfig(replicate=2, shard=2))
    with samestep.start(device="cpu", timeout=timedelta(seconds=10), strategy=part) as world:
        assert world.mesh is not None
        group = world.mesh.get_group("shard")
        number = torch.ones(1)
        dist.all_reduce(number, group=group)
        if world.rank > 0:
            time.sleep(60)  # the launcher ends this rank after the failure of rank 0
        start = time.monotonic()
        try:
            if kind == "message":
                for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, number, group=group, group_peer=1)]):
                    work.wait()
            else:
                dist.all_reduce(number, group=group)
        except RuntimeError as error:
            raise PeerLostError(f"gave up after {time.monotonic() - start:.0f} s") from error


def forward_functions() -> dict[str, Any]:
    """Train with and without a function that calls parts of a model; return weights and reductions during backward."""

    def twice(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        logits = model(inputs) + model.last(model.first(inputs))
        return nn.functional.cross_entropy(logits, targets)

    with samestep.start(device="cpu", threads=1) as world:
        results: dict[str, Any] = {}
        for name, forward, microbatches in (("plain", None, 4), ("function", twice, 4), ("unequal", twice, 6)):
            net = seeded(0, Net).double()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
            loss = None if forward else nn.CrossEntropyLoss()
            engine = samestep.Engine(net, optimizer, loss or samestep.cross_entropy, world=world)
            counts = []
            for step in range(4):
                during = _count_reductions(engine) if world.size > 1 else []
                inputs, targets = random_data(36, features=12, seed=step)
                engine.step(batch_of(world, inputs, targets, microbatches), forward=forward)
                counts.append(len(during))
            bits = hashlib.sha256(flatten(list(net.parameters()), list(net.parameters())).detach().numpy().tobytes())
            results[name] = bits.hexdigest(), counts
        return results


def leave_out_parameters() -> None:
    """Train with a forward function whose loss lacks parameters of the model on one rank, in the fifth step."""

    def forward(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        hidden = model.norm(model.first(inputs))
        logits = model.last(hidden) if is_short else model(inputs)
        return nn.functional.cross_entropy(logits, targets)

    with samestep.start(device="cpu", threads=1) as world:
        net = seeded(0, Net).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world)
        for step in range(6):
            is_short = step == 4 and world.rank == 1
            engine.step(batch_of(world, *random_data(36, features=12, seed=step), 4), forward=forward)


def continue_after_unused_parameter() -> list[float]:
    """Return the losses of steps, one of which leaves out parameters in every microbatch; its error is caught."""

    def forward(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        hidden = model.norm(model.first(inputs))
        return nn.functional.cross_entropy(model.last(hidden) if is_short else model(inputs), targets)

    losses = []
    with samestep.start(device="cpu", threads=1) as world:
        net = seeded(0, Net).double()
        engine = samestep.Engine(net, torch.optim.SGD(net.parameters(), lr=0.02), samestep.cross_entropy, world=world)
        for step in range(8):
            is_short = step == 4
            try:
                losses.append(
                    engine.step(batch_of(world, *random_data(36, features=12, seed=step), RANKS), forward=forward).loss
                )
            except UnusedParameterError:
                assert is_short
    return losses


class _SkippingNet(Net):
    """Network that leaves out its first layer, whose gradients are in the last bucket, for microbatches of ones."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not bool((inputs == 1).all()):
            return super().forward(inputs)
        hidden = self.norm(nn.functional.pad(inputs, (0, 52)))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


def continue_after_unused_layer() -> tuple[list[float], list[int]]:
    """Leave out a layer in the last microbatch of each of 3 ranks, in one step, and catch the error.

    Return the losses of the other steps, and the lengths of the buckets that are reduced when the error is caught.
    """
    losses, caught = list[float](), list[int]()
    with samestep.start(device="cpu", threads=1, strategy=StrategyConfig(bucket_mb=0.02)) as world:
        net = seeded(0, _SkippingNet).double()
        engine = samestep.Engine(net, torch.optim.SGD(net.parameters(), lr=0.02), samestep.cross_entropy, world=world)
        for step in range(8):
            inputs, targets = random_data(36, features=12, seed=step)
            is_short = step == 4
            if is_short:
                for start, stop in [microbatch_bounds(36, MICROBATCHES)[number] for number in (1, 4, 7)]:
                    inputs[start:stop] = 1
            with _delayed_reductions(engine) if is_short else nullcontext([]) as reduced:
                try:
                    losses.append(engine.step(batch_of(world, inputs, targets, MICROBATCHES)).loss)
                except UnusedParameterError:
                    assert is_short
                    caught = list(reduced)
    return losses, caught


@contextmanager
def _delayed_reductions(engine: samestep.Engine) -> Iterator[list[int]]:
    """Delay the reduction of each bucket during backward; the list grows with the length of each."""
    strategy: Any = engine.step_runner.strategy
    reduction, reduced = strategy._reduction, list[int]()
    reduce = reduction.reduce_bucket

    def delayed(*arguments: Any) -> Any:
        time.sleep(0.2)
        result = reduce(*arguments)
        reduced.append(len(result))
        return result

    reduction.reduce_bucket = delayed
    yield reduced
    del reduction.reduce_bucket


def _count_reductions(engine: samestep.Engine) -> list[int]:
    """Return a list that grows with each bucket that the next steps reduce during backward."""
    strategy: Any = engine.step_runner.strategy
    reduce, calls = type(strategy).reduce_bucket, list[int]()

    def counted(bucket: dist.GradBucket) -> Any:
        calls.append(bucket.index())
        return reduce(strategy, bucket)

    strategy.reduce_bucket = counted
    return calls
