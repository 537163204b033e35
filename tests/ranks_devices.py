"""The same training on several devices of a rank, for `parallel_layouts/test_dp.py` and `test_placed.py`."""

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
from models import Tokens
from ranks_loader import gathered
from samestep.config import StepRules, StrategyPart
from samestep.engine.at_once import GradientsAtOnce
from samestep.engine.step import Engine
from samestep.errors import InputError

World = samestep.World
# Shards of four samples; the last batch of an epoch has eleven, or three that leave shards without any, which batch
# norm could do nothing with.
SHARDS, BATCH, STEPS = 5, 20, 8
SAMPLES, SMALL = 71, ("Toy", "Recurrent", "Tokens")
HALF = STEPS // 2
WIDTH, CLASSES = 10, 4


class Toy(nn.Module):
    """The two layers of the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(WIDTH, 10), nn.ReLU(), nn.Linear(10, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net2(self.relu(self.net1(inputs)))
        return outputs


class Normed(nn.Module):
    """Batch norm, a layer that is used twice, a frozen one, and places for what draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, 12)
        self.frozen, self.last = nn.Linear(12, 12).requires_grad_(False), nn.Linear(12, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.twice(self.norm(self.first(inputs))))
        hidden = self.drawn(torch.tanh(self.frozen(self.twice(hidden))))
        outputs: torch.Tensor = self.last(hidden)
        return outputs

    def drawn(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Dropping(Normed):
    """Draws from torch's generator."""

    def drawn(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.3, self.training)


class ByPython(Normed):
    """Draws from Python's generator."""

    def drawn(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 0.1 * random.random())


class ByNumpy(Normed):
    """Draws from NumPy's generator."""

    def drawn(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + 0.1 * float(numpy.random.random_sample()))


class Late(torch.autograd.Function):
    """Draws in backward alone."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * (1 + 0.1 * torch.rand(()).item())


class DrawingLate(Normed):
    """Draws from torch's generator in backward."""

    def drawn(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = Late.apply(hidden)
        return outputs


class Chain(nn.Sequential):
    """Layers in order, one of them a chain too, with batch norm and dropout."""

    def __init__(self) -> None:
        inner = nn.Sequential(nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 16))
        super().__init__(
            nn.Linear(WIDTH, 24), inner, nn.Dropout(0.2), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        )


class Recurrent(nn.Module):
    """An LSTM over the features, whose weights torch keeps in a list beside."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.lstm(inputs.unsqueeze(2))[0][:, -1])
        return outputs


MODELS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (Toy, Normed, Dropping, ByPython, ByNumpy, DrawingLate, Chain, Recurrent, Tokens)
}


@contextmanager
def alone(strategy: StrategyPart | None = None, device: Literal["cpu", "cuda"] = "cpu") -> Iterator[World]:
    """This process as a world of one, under a strategy."""
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


def made(
    world: World, model: str, *, dtype: torch.dtype = torch.float32, check_every: int | None = None, **rules: Any
) -> tuple[Engine, Any]:
    """An engine and its batches."""
    torch.manual_seed(0)
    net = MODELS[model]().to(dtype)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return (
        Engine(
            net,
            torch.optim.SGD(trained, lr=0.1, momentum=0.9),
            samestep.cross_entropy,
            world=world,
            rules=StepRules(**{"clip_norm": 0.4, **rules}),
            ema=0.9,
            check_every=check_every,
        ),
        samestep.loader(data_of(model, dtype), batch_size=BATCH, shards=SHARDS, shuffle=True, world=world),
    )


def steps_of(engine: Engine, batches: Any, until: int) -> list[str]:
    """What each step told, until that many are done."""
    found = []
    while engine.steps < until:
        for batch in batches:
            found.append(str(engine.step(batch)))  # as text, in which one NaN equals another
            if engine.steps == until:
                break
    return found


def outcome(engine: Engine, model: str) -> dict[str, Any]:
    """What training has led to."""
    assert engine.averaged is not None
    data = data_of(model, next(engine.model.parameters()).dtype)
    evaluation = samestep.loader(data, batch_size=BATCH, shards=SHARDS, world=engine.world)
    return {
        "strategy": engine.strategy,
        "state": {name: tensor.cpu().clone() for name, tensor in engine.model.state_dict().items()},
        "average": {name: tensor.cpu().clone() for name, tensor in engine.averaged.tensors.items()},
        "evaluation": engine.evaluate(evaluation),
    }


def trained(world: World, model: str, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Some steps, with a checkpoint in the middle if there is a folder for it."""
    engine, batches = made(world, model, **options)
    found = steps_of(engine, batches, HALF)
    if folder is not None:
        samestep.Checkpoints(folder, engine, batches).save()
    found += steps_of(engine, batches, STEPS)
    gradients = engine._gradients
    turns = gradients.takes_turns if isinstance(gradients, GradientsAtOnce) else None
    return {"steps": found, "turns": turns, **outcome(engine, model)}


def gone_on(world: World, model: str, folder: Path, **options: Any) -> dict[str, Any]:
    """The second half of the steps, from a checkpoint."""
    engine, batches = made(world, model, **options)
    assert samestep.Checkpoints(folder, engine, batches).resume()
    return {"steps": steps_of(engine, batches, STEPS), **outcome(engine, model)}


def require_same_bits(found: dict[str, Any], expected: dict[str, Any], first_step: int = 0) -> None:
    assert found["steps"] == expected["steps"][first_step:]
    assert found["evaluation"] == expected["evaluation"]
    for kind in ("state", "average"):
        assert found[kind].keys() == expected[kind].keys()
        different = [name for name, tensor in expected[kind].items() if not torch.equal(found[kind][name], tensor)]
        assert not different, kind


def refusal(strategy: StrategyPart, model: nn.Module, rules: StepRules | None = None) -> InputError:
    """What an engine says of a model that a strategy does not fit."""
    with alone(strategy) as world:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        try:
            Engine(model, optimizer, samestep.cross_entropy, world=world, rules=rules)
        except InputError as refused:
            return refused
    raise AssertionError("nothing was refused")


def placed_on_ranks(parts: dict[str, StrategyPart], model: str, folder: Path | None) -> dict[str, list[dict[str, Any]]]:
    """By strategy, what every rank found."""
    found = {}
    for name, part in parts.items():
        with samestep.start(device="cpu", strategy=part) as world:
            where = folder / name if folder is not None else None
            found[name] = gathered(trained(world, model, where, check_every=2))
    return found
