"""Rank functions for `unit/engine/test_exact_batching.py`: microbatches computed together or one by one."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of
from samestep.config import StepConfig
from samestep.distributed.world import all_gather
from samestep.engine.engine import Engine
from samestep.engine.exact_batching import BatchedRunner
from samestep.zoo.text.models import GPT

SAMPLES, CLASSES, LENGTH, STEPS = 16, 11, 8, 4
Rows = torch.Tensor


def gpt(dropout: float = 0.0) -> nn.Module:
    return GPT(num_classes=CLASSES, n_embd=16, n_head=2, n_layer=1, block_size=LENGTH, dropout=dropout)


class Perceptron(nn.Module):
    """A perceptron with a frozen layer and a function in front of the last layer."""

    def __init__(self, function: Callable[[Rows], Rows] = functional.relu) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (
            nn.Linear(LENGTH, 16),
            nn.Linear(16, 16),
            nn.Linear(16, CLASSES, bias=False),
        )
        self.norm, self.function = nn.LayerNorm(16), function
        self.frozen.requires_grad_(False)

    def forward(self, values: Rows) -> Rows:
        result: Rows = self.last(self.function(self.norm(self.frozen(self.first(values.float())))))
        return result


class Switched(Perceptron):
    """A perceptron that joins samples as soon as a loop changes a number."""

    mode = 0

    def __init__(self) -> None:
        super().__init__(self._activation)
        self.power = 0.0

    def _activation(self, values: Rows) -> Rows:
        values = by_samples(values) if self.power == 1 else values
        return by_size(values) if self.power == 2 or self.mode == 1 else values


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * (LENGTH - 2), CLASSES))

    def forward(self, values: Rows) -> Rows:
        result: Rows = self.net(values.float().unsqueeze(1))
        return result


def is_large(values: Rows) -> Rows:
    return values / 2 if values.abs().max() > 1e6 else values


def by_size(values: Rows) -> Rows:
    """A function whose bits depend on the number of rows, as those of a kernel can."""
    return values * (1 + 2**-20 * len(values))


def by_samples(values: Rows) -> Rows:
    return values - values.mean(0)


def softmax_of_samples(values: Rows) -> Rows:
    return values.softmax(dim=-2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "perceptron": Perceptron,
    "switched": Switched,
    "dropout": lambda: gpt(0.1),
    "convolution": Convolution,
    "branch": lambda: Perceptron(is_large),
    "rows": lambda: Perceptron(by_size),
    "mean": lambda: Perceptron(by_samples),
    "softmax": lambda: Perceptron(softmax_of_samples),
    "batch norm": lambda: nn.Sequential(Perceptron(), nn.BatchNorm1d(CLASSES)),
}


def _double_gradient(parameter: torch.Tensor) -> None:
    parameter.register_hook(lambda gradient: None if gradient is None else 2 * gradient)


# Changes of a model of type `Switched` after the decision to compute microbatches together.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "mean over samples": lambda model: setattr(model, "power", 1),
    "number": lambda model: setattr(model, "power", 2),
    "number of the class": lambda model: setattr(Switched, "mode", 1),
    "function": lambda model: setattr(model, "function", by_size),
    "forward": lambda model: setattr(model.frozen, "forward", by_size),
    "hook of a parameter": lambda model: _double_gradient(model.last.weight),
    "hook of a module": lambda model: model.norm.register_forward_hook(lambda module, inputs, rows: by_size(rows)),
}


def changed(world: samestep.World, name: str, *, together: bool) -> tuple[str, bool | None, str | None]:
    """Return the results of training in which the model changes before the fourth of six steps."""

    def change(engine: Engine, step: int) -> None:
        if step == 3:
            assert engine.computes_together is together
            CHANGES[name](engine.model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Switched, "mode", 0)
        return train(world, "switched", 8, together=together, samples=(SAMPLES,) * 6, before_step=change)


def train(
    world: samestep.World,
    name: str,
    microbatches: int,
    *,
    together: bool,
    samples: tuple[int, ...] = (SAMPLES,) * STEPS,
    prepare: Callable[[Engine], Any] = lambda engine: None,
    before_step: Callable[[Engine, int], Any] = lambda engine, step: None,
    **options: Any,
) -> tuple[str, bool | None, str | None]:
    """Return a hash of losses and weights after some steps, and how this rank computed its microbatches."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, config=StepConfig(**options))
    prepare(engine)
    runner = engine._components.runner
    if not together:
        runner.computes_together = False
    total = hashlib.sha256()
    for step, size in enumerate(samples):
        before_step(engine, step)
        generator = torch.Generator().manual_seed(step)
        targets_shape = (size, LENGTH) if isinstance(model, GPT) else (size,)
        inputs = torch.randint(CLASSES, (size, LENGTH), generator=generator)
        targets = torch.randint(CLASSES, targets_shape, generator=generator)
        total.update(repr(engine.step(batch_of(world, inputs, targets, microbatches)).loss).encode())
    for tensor in model.state_dict().values():
        total.update(tensor.numpy().tobytes())
    return total.hexdigest(), engine.computes_together, engine.alone_reason


def use_always() -> None:
    """Use equal bits regardless of the measured times, which depend on the load of the machine."""
    BatchedRunner._times = lambda self, parts, position: (1.0, 0.0)  # type: ignore[method-assign]


def run() -> list[list[tuple[str, bool | None, str | None]]]:
    """Return the results of training with 8 microbatches on every rank."""
    use_always()
    with samestep.start(device="cpu") as world:
        return all_gather([train(world, name, 8, together=True) for name in ("gpt", "perceptron")], world)


def run_changed() -> list[list[tuple[str, bool | None, str | None]]]:
    """Return the results of training with each change on every rank."""
    use_always()
    with samestep.start(device="cpu") as world:
        return all_gather([changed(world, name, together=True) for name in CHANGES], world)
