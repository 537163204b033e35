"""Training on several devices of a rank, for `strategies/test_dp.py` and `test_device_map.py`."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from helpers.models import Tokens
from samestep.config import StepConfig, StrategyConfig
from samestep.engine.data_parallel import DataParallelRunner
from samestep.engine.engine import Engine
from samestep.errors import InputError
from workers.loader import gathered

World = samestep.World
# Microbatches of 4 samples. The last batch of an epoch has 11 samples, or 3 for models without batch norm: then some
# microbatches are empty.
MICROBATCHES, BATCH, STEPS = 5, 20, 8
SAMPLES, SMALL = 71, ("Toy", "Recurrent", "Tokens")
HALF = STEPS // 2
WIDTH, CLASSES = 10, 4


class Toy(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(WIDTH, 10), nn.ReLU(), nn.Linear(10, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net2(self.relu(self.net1(inputs)))
        return outputs


class Normed(nn.Module):
    """Batch norm, a layer that is used twice, a frozen layer, and a hook method for random operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)
        self.frozen, self.last = nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twice(self.norm(self.first(inputs))))
        hidden = self.perturb(torch.tanh(self.frozen(self.twice(hidden))))
        outputs: torch.Tensor = self.last(hidden)
        return outputs

    def perturb(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Dropping(Normed):
    """Random draws from torch's generator."""

    def perturb(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.3, self.training)


class ByPython(Normed):
    """Random draws from Python's generator."""

    def perturb(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 0.1 * random.random())


class ByNumpy(Normed):
    """Random draws from NumPy's generator."""

    def perturb(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 0.1 * float(numpy.random.random_sample()))


class RandomBackward(torch.autograd.Function):
    """Identity that draws in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * (1 + 0.1 * torch.rand(()).item())


class DrawingLate(Normed):
    """Random draws from torch's generator in backward."""

    def perturb(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = RandomBackward.apply(hidden)
        return outputs


class Chain(nn.Sequential):
    """Nested sequential modules with batch norm and dropout."""

    def __init__(self) -> None:
        inner = nn.Sequential(nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 16))
        super().__init__(
            nn.Linear(WIDTH, 24), inner, nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )


class Recurrent(nn.Module):
    """LSTM over the features; torch stores its weights in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.lstm(inputs.unsqueeze(2))[0][:, -1])
        return outputs


class MovingLSTM(nn.LSTM):
    """LSTM that moves new parameters to other memory in a forward, as cuDNN's on a GPU."""

    def flatten_parameters(self) -> None:
        with torch.no_grad():
            for weights in self._flat_weights:
                weights.set_(weights.clone())


class Moving(Recurrent):
    """Recurrent model as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = MovingLSTM(1, 6, batch_first=True)


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (Toy, Normed, Dropping, ByPython, ByNumpy, DrawingLate, Chain, Recurrent, Moving, Tokens)
}


@contextmanager
def single_process(strategy: StrategyConfig | None = None, device: Literal["cpu", "cuda"] = "cpu") -> Iterator[World]:
    """Start a world of size 1 with a strategy."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    try:
        with samestep.start(device=device, strategy=strategy) as world:
            yield world
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def data_of(model: str, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    size = 63 if model in SMALL else SAMPLES
    if model == "Tokens":
        tokens = torch.randint(0, 11, (size, 7), generator=generator)
        return TensorDataset(tokens, tokens.masked_fill(tokens == 3, -100))
    inputs = torch.randn(size, WIDTH, generator=generator, dtype=dtype)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))


def build(
    world: World, model: str, *, dtype: torch.dtype = torch.float32, check_every: int | None = None, **options: Any
) -> tuple[Engine, Any]:
    """Return an engine and its batches."""
    torch.manual_seed(0)
    net = MODELS[model]().to(dtype)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return (
        Engine(
            net,
            torch.optim.SGD(trained, lr=0.1, momentum=0.9),
            samestep.cross_entropy,
            world=world,
            config=StepConfig(**{"clip_norm": 0.4, **options}),
            ema=0.9,
            check_every=check_every,
        ),
        samestep.loader(data_of(model, dtype), batch_size=BATCH, microbatches=MICROBATCHES, shuffle=True, world=world),
    )


def steps_of(engine: Engine, batches: Any, until: int) -> list[str]:
    """Return the results of steps as text, up to a number of steps."""
    results = []
    while engine.steps < until:
        for batch in batches:
            results.append(str(engine.step(batch)))  # text, because NaN != NaN
            if engine.steps == until:
                break
    return results


def outcome(engine: Engine, model: str) -> dict[str, Any]:
    """Return weights, averaged weights and evaluation."""
    assert engine.averaged is not None
    data = data_of(model, next(engine.model.parameters()).dtype)
    evaluation = samestep.loader(data, batch_size=BATCH, microbatches=MICROBATCHES, world=engine.world)
    return {
        "strategy": engine.strategy,
        "state": {name: tensor.cpu().clone() for name, tensor in engine.model.state_dict().items()},
        "average": {name: tensor.cpu().clone() for name, tensor in engine.averaged.tensors.items()},
        "evaluation": engine.evaluate(evaluation),
    }


def train(world: World, model: str, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train for some steps; save a checkpoint in the middle if there is a folder."""
    engine, batches = build(world, model, **options)
    steps = steps_of(engine, batches, HALF)
    if folder is not None:
        samestep.CheckpointManager(folder, engine, batches).save()
    steps += steps_of(engine, batches, STEPS)
    runner = engine._components.runner
    is_sequential = runner.is_sequential if isinstance(runner, DataParallelRunner) else None
    return {"steps": steps, "sequential": is_sequential, **outcome(engine, model)}


def resume(world: World, model: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Compute the second half of the steps from a checkpoint."""
    engine, batches = build(world, model, **options)
    assert samestep.CheckpointManager(folder, engine, batches).resume()
    return {"steps": steps_of(engine, batches, STEPS), **outcome(engine, model)}


def require_same_bits(result: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    assert result["steps"] == expected["steps"][first_step:]
    assert result["evaluation"] == expected["evaluation"]
    for kind in ("state", "average"):
        assert result[kind].keys() == expected[kind].keys()
        different = [name for name, tensor in expected[kind].items() if not torch.equal(result[kind][name], tensor)]
        assert not different, kind


def engine_error(strategy: StrategyConfig, model: nn.Module, config: StepConfig | None = None) -> InputError:
    """Return the error of an engine for a model that does not fit the strategy."""
    with single_process(strategy) as world:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        try:
            Engine(model, optimizer, samestep.cross_entropy, world=world, config=config)
        except InputError as error:
            return error
    raise AssertionError("no error")


def train_on_ranks(
    configs: dict[str, StrategyConfig], model: str, folder: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Train with each strategy; return the results by strategy and rank."""
    results = {}
    for name, config in configs.items():
        with samestep.start(device="cpu", strategy=config) as world:
            checkpoints = folder / name if folder is not None else None
            results[name] = gathered(train(world, model, checkpoints, check_every=2))
    return results
