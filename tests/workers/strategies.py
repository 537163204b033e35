"""Rank functions for `conformance/test_strategies.py`: every strategy with the same batches."""

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from helpers.models import seeded
from samestep.engine.build import build_strategy
from samestep.microbatches import microbatch_bounds
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.local_parameters import LocalParameters
from samestep.strategies.strategy import DeferredStrategy, SingleStrategy, Strategy
from workers.loader import gathered
from workers.reductions import as_bytes, own_microbatches, vector_of

World = samestep.World
MICROBATCHES = 8
# A full batch, one with microbatches of unequal size, two that leave ranks without samples, and another small batch.
SIZES = [32, 19, 3, 1, 9]


class Wide(nn.Sequential):
    """More than a megabyte of weights, for several buckets, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 600), nn.Tanh(), nn.Linear(600, 150))
        self.append(nn.Linear(150, 150).requires_grad_(False))
        self.append(nn.Linear(150, 3))


class Mixed(nn.Module):
    """Weights of two dtypes, and one matrix that is used twice."""

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


def build_all(world: World, model: nn.Module, reduction: Any) -> dict[str, Strategy]:
    """Return every strategy that is possible in a world."""
    strategies: dict[str, Strategy] = {}
    if world.size == 1:
        strategies["single"] = SingleStrategy("single", model, build_reduction(reduction, world, trained(model)))
    wrapped, plain = copy.deepcopy(model), copy.deepcopy(model)
    sums = [build_reduction(reduction, world, trained(copy_)) for copy_ in (wrapped, plain)]
    strategies["ddp"] = DdpStrategy(wrapped, trained(wrapped), sums[0], world)
    strategies["deferred"] = DeferredStrategy(plain, LocalParameters(plain, world), sums[1], world)
    return strategies


def inputs_of(size: int) -> torch.Tensor:
    return torch.randn(size, 40, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (model(inputs.to(dtype)) - inputs[:, :3].to(dtype)).square().sum()


def gradients(strategy: Strategy, world: World, size: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], bytes]:
    """Return `.grad` after one step, and the sum of the vectors."""
    tree, inputs = MicrobatchTree(MICROBATCHES, size), inputs_of(size)
    bounds, microbatches = microbatch_bounds(size, MICROBATCHES), own_microbatches(tree, world)
    strategy.module.zero_grad(set_to_none=True)
    vectors = {(microbatch, microbatch + 1): vector_of(microbatch) for microbatch in microbatches}
    total = None
    for microbatch in microbatches:
        last = microbatch == microbatches[-1]
        with strategy.microbatch(tree, microbatch, last=last):
            loss = loss_of(strategy.module, inputs[slice(*bounds[microbatch])], dtype)
            strategy.prepare_backward()
            if last:
                total = strategy.sum_vectors(tree, vectors, 7)
            loss.backward()
    total = total or strategy.sum_vectors(tree, vectors, 7)
    strategy.finish(tree)
    result = [p.grad.detach().clone() for p in trained(strategy.module) if p.grad is not None]
    return result, as_bytes([total()])


def reference(model: nn.Module, size: int) -> list[torch.Tensor]:
    """Return the gradient of the complete batch in float64."""
    double = copy.deepcopy(model).double()
    loss_of(double, inputs_of(size), torch.float64).backward()
    return [p.grad for p in trained(double) if p.grad is not None]


def error(result: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative distance of a gradient from its reference."""
    pairs = zip(result, expected, strict=True)
    return max(float((gradient.double() - reference).norm() / reference.norm()) for gradient, reference in pairs)


def steps() -> list[dict[tuple[str, str, str], dict[str, Any]]]:
    """Return results after each batch, by rank, reduction, model and strategy."""
    results = {}
    with samestep.start(device="cpu") as world:
        for model_name, (kind, dtype) in MODELS.items():
            model = seeded(0, kind, dtype=dtype)
            expected = {size: reference(model, size) for size in SIZES} if world.is_main else {}
            for reduction in ("exact", "fast"):
                for name, strategy in build_all(world, copy.deepcopy(model), reduction).items():
                    results[reduction, model_name, name] = outcome(strategy, world, dtype, expected)
        return gathered(results)


def outcome(
    strategy: Strategy, world: World, dtype: torch.dtype, expected: dict[int, list[torch.Tensor]]
) -> dict[str, Any]:
    """Return the sums of one strategy for all batches."""
    result: dict[str, Any] = {"name": strategy.name, "bits": {}, "errors": {}, "vectors": {}}
    for size in SIZES:
        sums, vectors = gradients(strategy, world, size, dtype)
        result["bits"][size] = hashlib.sha256(as_bytes(sums)).hexdigest()
        if world.is_main:  # other ranks have the same bits
            result["errors"][size] = error(sums, expected[size])
        result["vectors"][size] = vectors
    frozen = [parameter for parameter in strategy.module.parameters() if not parameter.requires_grad]
    return {**result, "frozen": [parameter.grad is None for parameter in frozen]}


def strategy_name() -> str:
    """Return the name of the strategy of a world."""
    with samestep.start(device="cpu") as world:
        model = nn.Linear(2, 2)
        return build_strategy(model, LocalParameters(model, world), "exact", world).name
