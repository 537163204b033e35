"""What ranks run for `parallel_layouts/test_ddp_options.py`."""

import hashlib
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from batches import batch_of, random_data
from models import Picky, seeded
from ranks_loader import gathered
from samestep.config import Mesh, StepRules, StrategyPart
from samestep.config.strategy import Hook
from samestep.errors import InputError, PeerLostError
from samestep.parallel.flat import flattened, taken_apart
from samestep.parallel.low_rank import LowRankSum
from samestep.parallel.rounded import rounded_sum

SHARDS, BATCH, SAMPLES, STEPS = 8, 24, 96, 10
OPTIONS: dict[str, StrategyPart] = {
    "plain": StrategyPart(),
    "1 MB": StrategyPart(bucket_mb=1),
    "25 MB": StrategyPart(bucket_mb=25),
    "many buckets": StrategyPart(bucket_mb=0.02),
    "fp16": StrategyPart(hook="fp16"),
    "fp16, many buckets": StrategyPart(hook="fp16", bucket_mb=0.02),
    "bf16": StrategyPart(hook="bf16"),
    "powersgd": StrategyPart(hook="powersgd"),
    "powersgd, many buckets": StrategyPart(hook="powersgd", bucket_mb=0.02),
}
PRODUCTS: dict[str, StrategyPart] = {
    "tp": StrategyPart(name="ddp", mesh=Mesh(tensor=2), plan={"blocks.*": "column_gathered"}),
    "pp": StrategyPart(name="ddp", mesh=Mesh(pipeline=2)),
}
PRODUCTS |= {f"{name} fp16": replace(part, hook="fp16") for name, part in PRODUCTS.items()}


class Net(nn.Module):
    """Batch norm, dropout, and matrices large enough to be made narrow."""

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


def trained(option: str) -> dict[str, Any]:
    """Some steps under an option, what they lead to, and a hash of it."""
    inputs = torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    with samestep.start(device="cpu", strategy={**OPTIONS, **PRODUCTS}[option]) as world:
        net = seeded(0, Net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        engine = samestep.Engine(
            net, optimizer, nn.CrossEntropyLoss(), world=world, rules=StepRules(clip_norm=0.5), ema=0.9
        )
        batches = samestep.loader(data, batch_size=BATCH, shards=SHARDS, shuffle=True, world=world)
        steps = []
        while engine.steps < STEPS:
            steps += [engine.step(batch) for batch in batches]
        values = engine.evaluate(samestep.loader(data, batch_size=20, shards=SHARDS, world=world))
        here = {name: parameter for name, parameter in engine.pieces.held.items() if not parameter.is_meta}
        weights = {name: parameter.detach().clone() for name, parameter in here.items()}
        return {
            "steps": [(step.loss, step.grad_norm) for step in steps],
            "evaluation": values,
            "weights": weights,
            "bits": hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest(),
        }


def all_trained() -> dict[str, list[dict[str, Any]]]:
    """Every option, by rank."""
    found = {option: trained(option) for option in OPTIONS}
    with samestep.start(device="cpu") as world:
        return {option: gathered(outcome) for option, outcome in found.items()} if world.size > 1 else {}


def products_trained() -> dict[str, list[tuple[float, float]]]:
    """Loss and norm of each step where copies are of a model that is divided."""
    return {name: trained(name)["steps"] for name in PRODUCTS}


def numbers_of(rank: int, dtype: torch.dtype, size: float) -> torch.Tensor:
    """A rank's gradients of about `size`: large and small ones."""
    generator = torch.Generator().manual_seed(rank)
    spread = 10 ** (2 * torch.randn(1000, generator=generator, dtype=torch.float64).clamp(-1, 1))
    return (size * spread * torch.randn(1000, generator=generator, dtype=torch.float64)).to(dtype)


def rounded_sums() -> list[dict[str, Any]]:
    """By rank: sums in 16 bits of numbers of all sizes, and of some that are not finite."""
    found: dict[str, Any] = {}
    with samestep.start(device="cpu") as world:
        for name in ("float16", "bfloat16"):
            for size in (1e-12, 1e-6, 1.0, 1e9):
                found[f"{name} {size:g}"] = rounded_sum(
                    world, numbers_of(world.rank, torch.float32, size), getattr(torch, name)
                )
            for what in (torch.inf, torch.nan):
                numbers = numbers_of(world.rank, torch.float32, 1.0)
                if world.rank == 1:
                    numbers[3] = what
                found[f"{name} {what}"] = rounded_sum(world, numbers, getattr(torch, name))
            found[f"{name} zero"] = rounded_sum(world, torch.zeros(5), getattr(torch, name))
        return gathered(found)


def low_rank_sums() -> list[dict[str, Any]]:
    """By rank: what five steps send of gradients that are one narrow product, and of any; and after a bad step."""
    with samestep.start(device="cpu") as world:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((40, 50), (7,), (30, 4, 9))]

        def gradients(seed: int) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            return [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]

        def step(carrier: LowRankSum, mine: list[torch.Tensor]) -> list[torch.Tensor]:
            return taken_apart(carrier(parameters, flattened(mine, parameters)), parameters)

        left = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        narrow = gradients(world.rank)
        narrow[0] = left @ narrow[0][:4]
        found: dict[str, Any] = {"narrow": (narrow[0], step(LowRankSum(world, parameters), narrow)[0])}
        carrier = LowRankSum(world, parameters)
        given = [torch.zeros_like(p) for p in parameters]
        sent = [torch.zeros_like(p) for p in parameters]
        for number in range(5):
            mine = gradients(100 * number + world.rank)
            torch._foreach_add_(given, mine)
            torch._foreach_add_(sent, step(carrier, mine))
        found["given"], found["sent"] = given, sent
        found["rest"] = [carrier._rest.get(p, torch.zeros(())).clone() for p in parameters]
        bad = gradients(world.rank)
        if world.rank == 1:
            bad[0][2, 3] = torch.nan
        found["bad"] = step(carrier, bad)
        found["after"] = step(carrier, gradients(world.rank))
        return gathered(found)


def branch_of_one_rank(part: StrategyPart) -> None:
    """A second step in which one rank's last shard does not use a layer."""
    inputs, targets = random_data(2 * SHARDS)
    inputs[:, 0] = 1
    with samestep.start(device="cpu", strategy=part) as world:
        net = seeded(0, Picky)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = samestep.Engine(net, optimizer, samestep.cross_entropy, world=world)
        engine.step(batch_of(world, inputs, targets, SHARDS))
        inputs[10:12, 0] = -1
        engine.step(batch_of(world, inputs, targets, SHARDS))


def refused(hook: Hook) -> str:
    """What an engine with fp16 says to a hook."""
    with samestep.start(device="cpu", strategy=StrategyPart(hook=hook)) as world:
        net = nn.Linear(2, 2)
        try:
            samestep.Engine(
                net,
                torch.optim.SGD(net.parameters()),
                samestep.cross_entropy,
                world=world,
                rules=StepRules(precision="fp16"),
            )
        except InputError as error:
            return error.value
        return ""


def late(kind: str) -> None:
    """Rank 0 waits for one that does not come, in a group of the mesh."""
    part = StrategyPart(name="hsdp", mesh=Mesh(replicate=2, shard=2))
    with samestep.start(device="cpu", timeout=timedelta(seconds=4), strategy=part) as world:
        assert world.mesh is not None
        group = world.mesh.get_group("shard")
        number = torch.ones(1)
        dist.all_reduce(number, group=group)
        if world.rank > 0:
            time.sleep(60)  # the launcher ends them when rank 0 has failed
        began = time.monotonic()
        try:
            if kind == "message":
                for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, number, group=group, group_peer=1)]):
                    work.wait()
            else:
                dist.all_reduce(number, group=group)
        except RuntimeError as error:
            raise PeerLostError(f"gave up after {time.monotonic() - began:.0f} s") from error


def joined(found: list[torch.Tensor]) -> torch.Tensor:
    """Tensors side by side."""
    return torch.cat([tensor.flatten() for tensor in found])
