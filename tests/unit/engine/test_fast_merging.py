"""Microbatches that are computed together equal those computed one after another, to rounding."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import samestep
from helpers.batches import batch_of, random_data
from helpers.models import Picky, seeded
from samestep.config import StepConfig
from samestep.engine.engine import Engine

World = samestep.World
IMAGE = (6, 4, 4)
CLASSES = 4


class Images(nn.Sequential):
    """Convolutions with batch norm of three kinds of momentum, dropout in place, and a layer to be tested."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__(
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8, momentum=None),
            nn.Dropout(0.3, inplace=True),
            layer or nn.Identity(),
            nn.Flatten(),
            nn.Linear(32, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.Linear(8, CLASSES),
        )


class Shared(nn.Module):
    """Calls one batch norm layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(6), nn.Linear(96, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.norm(inputs).square()).flatten(1))


class Attention(nn.Module):
    """Torch's encoder layer, attention with dropout, and a random mask of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 8, batch_first=True)
        self.linear = nn.Linear(96, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(inputs.flatten(2))
        hidden = functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2, is_causal=True)
        size = (len(inputs), 1, 1)
        hidden = hidden * torch.rand(size, dtype=hidden.dtype) + torch.rand_like(hidden)
        return self.linear((hidden * hidden.new_empty(size).bernoulli_(0.8)).flatten(1))


def _scaled(inputs: torch.Tensor) -> torch.Tensor:
    return inputs / inputs.square().mean(0, keepdim=True).add(1)


class Scaled(nn.Module):
    """Divides by the mean square over samples."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _scaled(inputs)


class Gated(nn.Module):
    """Multiplies by the mean over samples to a power that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + self.gate * inputs.mean(0, keepdim=True))


class Average(nn.Module):
    """Holds a moving average of a nonlinear statistic of the batch."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * inputs.std())
        return inputs


class Noise(nn.Module):
    """Scales all samples by one random number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.rand((), dtype=inputs.dtype)


class Branch(nn.Module):
    """Depends on the first sample by a branch of the host."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs[0].sum() > -1e9 else -inputs


class Switch(nn.Module):
    """Joins samples after a loop changes a number."""

    is_on = False
    power = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _scaled(inputs) if self.is_on or self.power else inputs


class LateNoise(nn.Module):
    """Draws a random number of all samples from the second call in training."""

    calls: ClassVar = [0]  # not a number, of which a change repeats the check of the first step

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if self.calls[0] < 1 else inputs * torch.rand((), dtype=inputs.dtype)


def engine_of(world: World, model: nn.Module, **options: Any) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = StepConfig(**{"reduction": "fast", **options})
    return Engine(model, optimizer, nn.CrossEntropyLoss(), world=world, config=config)


def train(world: World, make: Callable[[], nn.Module], sizes: tuple[int, ...], **options: Any) -> Engine:
    """Return an engine after steps of batches of some sizes in 4 microbatches."""
    engine = engine_of(world, seeded(0, make), **options)
    for seed, size in enumerate(sizes):
        inputs, targets = random_data(size, features=96, classes=CLASSES, seed=seed)
        engine.step(batch_of(world, inputs.view(-1, *IMAGE), targets, 4))
    return engine


def distance(one: Engine, other: Engine) -> float:
    """Return the largest distance between elements of the states of two models."""
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return max(float((first.double() - second.double()).abs().max()) for first, second in pairs)


@pytest.mark.parametrize(("make", "last"), [(Images, 8), (Shared, 5), (Attention, 5)])
def test_merged_microbatches_equal_separate_ones(alone: World, make: Callable[[], nn.Module], last: int) -> None:
    sizes = (16, 19, 8, 11, last)  # equal and unequal microbatches, and microbatches of a single sample
    merged, separate = train(alone, make, sizes), train(alone, make, sizes, merge="off")
    assert merged.separate_reason is None
    assert 0 < distance(merged, separate) < 1e-12


def test_forward_is_called_once_per_step(alone: World) -> None:
    calls: list[int] = []
    model = seeded(0, Images)
    engine = engine_of(alone, model)
    inputs, targets = random_data(16, features=96, classes=CLASSES)
    batch = batch_of(alone, inputs.view(-1, *IMAGE), targets, 4)
    model.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments[0])))
    engine.step(batch)
    calls.clear()
    engine.step(batch)
    assert calls == [16]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Scaled, "the output of the layer 7 (Scaled)"),
        (Gated, "the gradient of 7.gate"),
        (Average, "7.average"),
        (Noise, "the layer 7 (Noise) draws random numbers"),
        (Branch, "the layer 7 (Branch) reads values"),
    ],
)
def test_layer_that_joins_samples_is_named(alone: World, layer: type[nn.Module], reason: str) -> None:
    def make() -> nn.Module:
        return Images(layer())

    sizes = (16, 11)
    merged, separate = train(alone, make, sizes), train(alone, make, sizes, merge="off")
    assert (merged.separate_reason or "").startswith(reason)
    assert distance(merged, separate) == 0


@pytest.mark.parametrize("options", [{"reduction": "exact"}, {"merge": "off"}])
def test_nothing_is_merged_or_reported_without_the_option(alone: World, options: dict[str, Any]) -> None:
    calls: list[int] = []
    engine = engine_of(alone, seeded(0, Images), **options)
    engine.model.register_forward_pre_hook(lambda module, arguments: calls.append(len(arguments[0])))
    inputs, targets = random_data(16, features=96, classes=CLASSES)
    engine.step(batch_of(alone, inputs.view(-1, *IMAGE), targets, 4))
    assert (calls, engine.separate_reason) == ([4, 4, 4, 4], None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_norm": "sync"}, "step.batch_norm: sync"),
        ({"recompute": ("0",)}, "step.recompute"),
        ({"gather": "global"}, "step.gather: global"),
    ],
)
def test_option_that_excludes_merging_is_named(alone: World, options: dict[str, Any], reason: str) -> None:
    assert train(alone, Images, (16,), **options).separate_reason == reason


def test_forward_function_is_a_reason(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Images))
    inputs, targets = random_data(16, features=96, classes=CLASSES)

    def forward(model: Any, data: Any) -> Any:
        return functional.cross_entropy(model(data[0]), data[1])

    engine.step(batch_of(alone, inputs.view(-1, *IMAGE), targets, 4), forward=forward)
    assert engine.separate_reason == "a forward function"


def test_branch_of_the_first_sample_is_computed_for_each_microbatch(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Picky))
    inputs, targets = random_data(16)
    inputs[:, 0] = inputs[:, 0].abs()
    engine.step(batch_of(alone, inputs, targets, 4))
    assert (engine.separate_reason or "").endswith("reads values for all samples at once")


def test_random_numbers_of_all_samples_in_a_later_step_end_the_merging(alone: World) -> None:
    states = []
    for merge in ("off", "auto"):
        engine = engine_of(alone, seeded(0, lambda: Images(LateNoise())).double(), merge=merge)
        inputs, targets = random_data(16, features=96, classes=CLASSES)
        batch = batch_of(alone, inputs.double().view(-1, *IMAGE), targets, 4)
        reasons = []
        for LateNoise.calls[0] in (0, 1, 1):
            engine.step(batch)
            reasons.append(engine.separate_reason is None)
        LateNoise.calls[0] = 0
        states.append(torch.cat([tensor.double().reshape(-1) for tensor in engine.model.state_dict().values()]))
    assert reasons == [True, False, False]
    assert torch.allclose(states[0], states[1], rtol=1e-12, atol=1e-12)


# Changes of the model after the first step, and the reason for separate microbatches in later steps.
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda model: setattr(model[7], "is_on", True), "the output of the layer 7 (Switch)"),
    "number of the class": (lambda model: setattr(Switch, "power", 1), "the output of the layer 7 (Switch)"),
    "hook of a module": (
        lambda model: model[11].register_forward_hook(lambda module, inputs, outputs: _scaled(outputs)),
        "the output of the layer 11 (Linear)",
    ),
    "hook of a parameter": (
        lambda model: model[9].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
        "the parameter 9.weight has hooks",
    ),
}


def _train_with_changes(world: World, merge: str, change: Callable[[int, Any], Any]) -> tuple[Engine, list[bool]]:
    """Return an engine after 6 steps, before each of which the model can change, and whether each step was merged."""
    engine = engine_of(world, seeded(0, lambda: Images(Switch())), merge=merge)
    merged = []
    for step in range(6):
        change(step, engine.model)
        inputs, targets = random_data(16, features=96, classes=CLASSES, seed=step)
        engine.step(batch_of(world, inputs.view(-1, *IMAGE), targets, 4))
        merged.append(engine.separate_reason is None)
    return engine, merged


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_repeats_the_check(alone: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    apply, reason = CHANGES[name]
    engines = []
    for merge in ("auto", "off"):
        monkeypatch.setattr(Switch, "power", 0)
        engine, merged = _train_with_changes(alone, merge, lambda step, model: apply(model) if step == 3 else None)
        assert merged == ([True] * 3 + [False] * 3 if merge == "auto" else [True] * 6)
        engines.append(engine)
    assert (engines[0].separate_reason or "").startswith(reason)
    assert (engines[0].separate_reason or "").endswith("from step 4 on")
    assert distance(*engines) < 1e-12


def test_harmless_changes_keep_merging_until_they_are_frequent(alone: World) -> None:
    def change_rate(step: int, model: Any) -> None:
        model[3].p = 0.2 if step < 4 else 0.4

    def count(step: int, model: Any) -> None:
        model.step = step

    results = [_train_with_changes(alone, merge, change_rate) for merge in ("auto", "off")]
    assert all(results[0][1])
    assert 0 < distance(results[0][0], results[1][0]) < 1e-12
    engine, merged = _train_with_changes(alone, "auto", count)
    assert merged == [True] * 3 + [False] * 3
    assert engine.separate_reason == "the model changes between steps, from step 4 on"


def test_bad_loss_names_its_microbatch(alone: World) -> None:
    engine = engine_of(alone, seeded(0, Images), non_finite="skip")
    inputs, targets = random_data(16, features=96, classes=CLASSES)
    engine.step(batch_of(alone, inputs.view(-1, *IMAGE), targets, 4))
    inputs[5] = float("nan")
    engine.config = StepConfig(reduction="fast", non_finite="stop")
    with pytest.raises(samestep.errors.NonFiniteError, match="the loss of microbatch 1 is not finite"):
        engine.step(batch_of(alone, inputs.view(-1, *IMAGE), targets, 4))


def test_callbacks_receive_each_microbatch(alone: World) -> None:
    seen: list[tuple[int, int, int]] = []

    class Sizes(samestep.Callback):
        def end_microbatch(self, microbatch: Any, outputs: Any, loss: Any) -> None:
            seen.append((microbatch.number, len(outputs), int(loss.count)))

    model = seeded(0, Images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = StepConfig(reduction="fast")
    engine = Engine(model, optimizer, samestep.cross_entropy, world=alone, config=config, callbacks=[Sizes()])
    inputs, targets = random_data(14, features=96, classes=CLASSES)
    engine.step(batch_of(alone, inputs.view(-1, *IMAGE), targets, 4))
    assert seen == [(0, 3, 3), (1, 4, 4), (2, 3, 3), (3, 4, 4)]
