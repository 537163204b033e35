"""What ranks run for `conformance/test_strategies.py`: every strategy over the same batches."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from models import seeded
from ranks_loader import gathered
from ranks_reductions import as_bytes, mine, vector_of
from samestep.parallel.ddp import DdpStrategy
from samestep.parallel.pieces import Pieces
from samestep.parallel.reduction import build_reduction
from samestep.parallel.single import SingleStrategy
from samestep.parallel.strategy import Strategy, build_strategy
from samestep.parallel.together import TogetherStrategy
from samestep.parallel.tree import ShardTree
from samestep.sharding import shard_bounds

World = samestep.World
SHARDS = 8
# A batch that fills all shards, one with shards of unequal size, two that leave ranks without samples, and one after.
SIZES = [32, 19, 3, 1, 9]


class Wide(nn.Sequential):
    """More than a megabyte of weights, so that gradients travel in several buckets; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 600), nn.Tanh(), nn.Linear(600, 150))
        self.append(nn.Linear(150, 150).requires_grad_(False))
        self.append(nn.Linear(150, 3))


class Mixed(nn.Module):
    """Weights of two precisions, and one matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(40, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def to(self, *args: Any, **kwargs: Any) -> "Mixed":
        super().to(*args, **kwargs)
        self.second.double()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)).double()
        hidden = torch.tanh(self.second(torch.tanh(self.second(hidden))))
        return self.third(hidden.to(self.third.weight.dtype))


MODELS: dict[str, tuple[type[nn.Module], torch.dtype]] = {
    "wide float32": (Wide, torch.float32),
    "wide float64": (Wide, torch.float64),
    "mixed": (Mixed, torch.float32),
}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def built(world: World, model: nn.Module, reduction: Any) -> dict[str, Strategy]:
    """Every strategy that a world allows."""
    found: dict[str, Strategy] = {}
    if world.size == 1:
        found["single"] = SingleStrategy(model, build_reduction(reduction, world, trained(model)))
    wrapped, apart = copy.deepcopy(model), copy.deepcopy(model)
    sums = [build_reduction(reduction, world, trained(each)) for each in (wrapped, apart)]
    found["ddp"] = DdpStrategy(wrapped, trained(wrapped), sums[0], world)
    found["together"] = TogetherStrategy(apart, Pieces(apart, world.device), sums[1], world)
    return found


def inputs_of(size: int) -> torch.Tensor:
    return torch.randn(size, 40, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (model(inputs.to(dtype)) - inputs[:, :3].to(dtype)).square().sum()


def gradients(strategy: Strategy, world: World, size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], bytes]:
    """What one step leaves in `.grad`, and the sum of the vectors that travelled with it."""
    tree, inputs = ShardTree(SHARDS, size), inputs_of(size)
    bounds, shards = shard_bounds(size, SHARDS), mine(tree, world)
    strategy.module.zero_grad(set_to_none=True)
    vectors = {shard: vector_of(shard) for shard in shards}
    total = None
    for shard in shards:
        last = shard == shards[-1]
        with strategy.shard(tree, shard, last=last):
            loss = loss_of(strategy.module, inputs[slice(*bounds[shard])], dtype)
            if last:
                total = strategy.sum_vectors(tree, vectors, 7)
            loss.backward()
    total = total or strategy.sum_vectors(tree, vectors, 7)
    strategy.finish(tree)
    found = [p.grad.detach().clone() for p in trained(strategy.module) if p.grad is not None]
    return found, as_bytes([total.wait()])


def reference(model: nn.Module, size: int) -> list[torch.Tensor]:
    """The gradient of the whole batch at once, in float64."""
    double = copy.deepcopy(model).double()
    loss_of(double, inputs_of(size), torch.float64).backward()
    return [p.grad for p in trained(double) if p.grad is not None]


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest distance of a gradient from its reference, relative to the reference."""
    pairs = zip(found, expected, strict=True)
    return max(float((mine.double() - whole).norm() / whole.norm()) for mine, whole in pairs)


def steps() -> list[dict[tuple[str, str, str], dict[str, Any]]]:
    """By rank: what was found after each batch, by reduction, model and strategy."""
    found = {}
    with samestep.start(device="cpu") as world:
        for called, (kind, dtype) in MODELS.items():
            model = seeded(0, kind, dtype=dtype)
            expected = {size: reference(model, size) for size in SIZES} if world.is_main else {}
            for reduction in ("exact", "fast"):
                for name, strategy in built(world, copy.deepcopy(model), reduction).items():
                    found[reduction, called, name] = outcome(strategy, world, dtype, expected)
        return gathered(found)


def outcome(
    strategy: Strategy, world: World, dtype: torch.dtype, expected: dict[int, list[torch.Tensor]]
) -> dict[str, Any]:
    """One strategy's sums over one batch after another."""
    found: dict[str, Any] = {"name": strategy.name, "bits": {}, "errors": {}, "vectors": {}}
    for size in SIZES:
        sums, vectors = gradients(strategy, world, size, dtype)
        found["bits"][size] = hashlib.sha256(as_bytes(sums)).hexdigest()
        if world.is_main:  # the others' bits tell the rest
            found["errors"][size] = error(sums, expected[size])
        found["vectors"][size] = vectors
    frozen = [parameter for parameter in strategy.module.parameters() if not parameter.requires_grad]
    return {**found, "frozen": [parameter.grad is None for parameter in frozen]}


def chosen() -> str:
    """The strategy that a world gets."""
    with samestep.start(device="cpu") as world:
        model = nn.Linear(2, 2)
        return build_strategy(model, Pieces(model, world.device), "exact", world).name
