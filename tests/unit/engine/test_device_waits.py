"""A step waits for its device once, for any number of microbatches; an evaluation twice."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import samestep
from helpers.batches import batch_of
from helpers.models import seeded
from helpers.waits import Waits
from samestep.config import StepConfig
from samestep.engine.buffers import ForwardState
from samestep.engine.checksum import state_checksum
from samestep.engine.engine import Engine
from samestep.microbatches import Cursor
from samestep.strategies.reduction import ExactReduction, MicrobatchTree
from samestep.strategies.strategy import SingleStrategy

World = samestep.World
LOSSES = {"shipped": samestep.cross_entropy, "mean": nn.functional.cross_entropy, "torch": nn.CrossEntropyLoss()}


class Convolutions(nn.Sequential):
    """Convolutions with `depth` batch norm layers."""

    def __init__(self, depth: int = 3) -> None:
        layers: list[nn.Module] = []
        for number in range(depth):
            layers += [nn.Conv2d(4 if number else 3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(4 * 16, 5))


def engine_of(
    world: World, model: nn.Module | None = None, loss: Any = samestep.cross_entropy, **options: Any
) -> Engine:
    model = model or seeded(0, Convolutions, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Engine(model, optimizer, loss, world=world, config=StepConfig(**options))


def images(world: World, microbatches: int, size: int = 16, pixels: int = 4) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, 3, pixels, pixels, generator=generator)
    return batch_of(world, inputs, torch.randint(0, 5, (size,), generator=generator), microbatches)


def waits_of_third_step(engine: Engine, batch: Any, **options: Any) -> Counter[str]:
    for _ in range(2):
        engine.step(batch, **options)
    with Waits() as waits:
        engine.step(batch, **options)
    return waits.calls


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_step_waits_once(alone: World, loss: str, precision: str, microbatches: int) -> None:
    engine = engine_of(alone, loss=LOSSES[loss], precision=precision, clip_norm=1.0)
    assert waits_of_third_step(engine, images(alone, microbatches)) == {"tolist": 1}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_checksum_of_the_state_waits_once(alone: World, optimizer: Any) -> None:
    model = seeded(0, Convolutions, dtype=torch.float32)
    engine = Engine(model, optimizer(model.parameters(), lr=0.01), samestep.cross_entropy, world=alone, ema=0.9)
    engine.step(images(alone, 4))
    state_checksum(engine, Cursor())  # creates the table of weights
    with Waits() as waits:
        value = state_checksum(engine, Cursor())
    assert value is not None
    assert waits.calls == {"__int__": 1}


def test_step_with_a_forward_function_and_values_waits_once(alone: World) -> None:
    def forward(model: Any, data: Any) -> dict[str, Any]:
        outputs = model(data[0])
        return {"loss": nn.functional.cross_entropy(outputs, data[1]), "largest": outputs.detach().amax()}

    assert waits_of_third_step(engine_of(alone), images(alone, 4), forward=forward) == {"tolist": 1}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_step_with_synchronized_batch_norm_waits_twice(alone: World, microbatches: int) -> None:
    engine = engine_of(alone, batch_norm="sync")
    assert waits_of_third_step(engine, images(alone, microbatches)) == {"tolist": 2}


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


@pytest.mark.parametrize("metric", ["accuracy", correct])
def test_evaluation_waits_twice(alone: World, metric: Any) -> None:
    engine = engine_of(alone)
    batches = [images(alone, 4), images(alone, 4)]
    with Waits() as waits:
        engine.evaluate(batches, [metric])
    assert sum(waits.calls.values()) <= 2, waits.calls


class Kernels(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count inside the block."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not self._is_paused:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_state_of_norm_layers_takes_equally_many_kernels_for_any_number_of_layers(
    alone: World, microbatches: int
) -> None:
    def operations(depth: int) -> Counter[str]:
        model = seeded(0, Convolutions, depth, dtype=torch.float32)
        state, tree = ForwardState(model), MicrobatchTree(microbatches, microbatches)
        strategy = SingleStrategy("single", model, ExactReduction(alone, []))
        for _ in range(3):
            with Kernels() as kernels:
                state.begin(microbatches)
                vectors = []
                for number in range(microbatches):
                    state.restore()
                    with kernels.paused():
                        model(torch.zeros(2, 3, 4, 4))
                    vectors.append(state.read(number, last=number == microbatches - 1))
                total = torch.stack(vectors).sum(0)
                state.combine(total, total[: state.control_length].tolist(), tree, strategy, alone)
                state.commit()
        return kernels.calls

    assert operations(2) == operations(7)
