"""Side effects of a forward: attributes of modules change, numbers and generators outside of the model do not."""

import random
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.modules import module

from samestep import World
from samestep.engine.side_effects import ModuleAttributes, OutsideState
from samestep.errors import InputError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.mask, self.calls, self.cache = torch.zeros(2), torch.ones(2), 0, None


@pytest.fixture
def layer() -> Layer:
    return Layer()


def first_step(attributes: ModuleAttributes, layer: Layer, world: World) -> None:
    attributes.begin()
    layer.mean = layer.mean + 1
    layer.mask = torch.ones(2)
    assert list(attributes.read(None, is_last=True)) == []
    attributes.combine(world, [], may_grow=False)
    attributes.commit()


def test_microbatches_start_with_the_values_of_the_step(layer: Layer) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    mean, layer.mean, layer.cache = layer.mean, torch.ones(2), torch.ones(3)
    list(attributes.read(None, is_last=False))
    attributes.restore()
    assert layer.mean is mean
    assert layer.cache is None
    layer.added = torch.ones(1)
    mean.add_(5)
    list(attributes.read(None, is_last=True))
    attributes.restore()
    assert not hasattr(layer, "added")
    assert mean.tolist() == [0.0, 0.0]


def test_last_microbatch_decides(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    for number in (1.0, 2.0):
        attributes.restore()
        layer.mean = layer.mean + number
        list(attributes.read(None, is_last=number == 2.0))
    layer.mean = torch.full((2,), 9.0)  # of a filler
    attributes.combine(alone, [], may_grow=False)
    attributes.commit()
    assert layer.mean.tolist() == [2.0, 2.0]


def test_activations_are_left_alone(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    attributes.begin()
    layer.cache = torch.ones(2, requires_grad=True) * 2
    list(attributes.read(None, is_last=True))
    attributes.combine(alone, [], may_grow=False)
    attributes.commit()
    assert layer.cache.grad_fn is not None


def test_attribute_that_changes_later_is_handled_from_then_on(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    first_step(attributes, layer, alone)
    attributes.begin()
    layer.mask = torch.zeros(2)  # every forward computes it again
    list(attributes.read(None, is_last=False))
    assert not attributes.has_changed_late
    attributes.restore()
    layer.calls = 3
    list(attributes.read(None, is_last=True))
    assert attributes.has_changed_late
    attributes.restore()
    assert layer.calls == 0
    attributes.combine(alone, [], may_grow=True)
    attributes.commit()
    assert layer.calls == 3


def test_late_write_in_place_and_that_of_a_replica_are_problems(layer: Layer, alone: World) -> None:
    attributes = ModuleAttributes(layer)
    first_step(attributes, layer, alone)
    attributes.begin()
    layer.mean.add_(1)
    assert list(attributes.read(None, is_last=False)) == []
    attributes.restore()
    replica = layer._replicate_for_data_parallel()
    replica.mean.add_(1)
    assert list(attributes.read(replica, is_last=False)) == ["attribute mean in place"]


COUNTS = {"calls": 0}
_calls = 0
_losses: list[float] = []


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own, self.default = nn.Linear(2, 2), torch.Generator(), torch.default_generator

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * _calls


def count_globally() -> None:
    global _calls  # noqa: PLW0603
    _calls += 1


def count_in_class() -> None:
    Counting.calls += 1


@pytest.mark.parametrize("change", [count_globally, count_in_class], ids=["global variable", "class"])
def test_change_of_a_number_is_refused(change: Callable[[], None]) -> None:
    state = OutsideState(Counting())
    with pytest.raises(InputError) as caught, state.unchanged(None):
        change()
    assert caught.value.code == "E_BUFFER"


def test_change_in_an_enclosing_function_is_refused() -> None:
    calls = 0

    def forward(model: object, data: object) -> None:
        nonlocal calls
        calls += 1

    state = OutsideState(nn.Linear(2, 2))
    for function in (forward, partial(forward, None)):
        with pytest.raises(InputError) as caught, state.unchanged(function):
            forward(None, None)
        assert "calls" in caught.value.value


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, lambda generator: torch.rand(1, generator=generator)),
        (numpy.random.default_rng, lambda generator: generator.random()),
        (numpy.random.RandomState, lambda generator: generator.rand()),
        (random.Random, lambda generator: generator.random()),
    ],
)
def test_draws_from_generators_are_refused(make: Callable[[], object], draw: Callable[[object], object]) -> None:
    generator = make()

    def forward() -> object:
        return draw(generator)

    with pytest.raises(InputError) as caught, OutsideState(nn.Linear(2, 2)).unchanged(forward):
        forward()
    assert "generator" in caught.value.value


def test_generator_in_an_attribute_is_covered() -> None:
    model = Counting()
    with pytest.raises(InputError) as caught, OutsideState(model).unchanged(None):
        torch.rand(1, generator=model.own)
    assert caught.value.value.endswith("own")


def test_lists_global_generators_and_other_variables_may_change() -> None:
    model = Counting()
    with OutsideState(model).unchanged(count_in_class):
        _losses.append(1.0)
        torch.rand(1), random.random(), numpy.random.rand()
        COUNTS["calls"] += 1


def test_without_a_model_nothing_is_required() -> None:
    with OutsideState().unchanged(count_globally):
        count_globally()


class Centered(nn.Module):
    """Loss that replaces its buffer, as in DINO."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(16), persistent=persistent)

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return (outputs - self.center).square().mean()


@pytest.mark.parametrize(
    ("critic", "buffer"),
    [
        (nn.Sequential(nn.BatchNorm1d(16)), "running_mean of a BatchNorm1d"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), "_u of a _SpectralNorm"),
        (Centered(), "center of a Centered"),
    ],
)
def test_changed_buffer_outside_of_the_model_is_refused(critic: nn.Module, buffer: str) -> None:
    model = nn.Linear(2, 16)
    with pytest.raises(InputError) as caught, OutsideState(model).unchanged(None, model):
        critic(model(torch.randn(3, 2)))
    assert caught.value.code == "E_BUFFER"
    assert buffer in caught.value.value
    assert not module._global_forward_pre_hooks


def test_buffers_of_the_model_and_its_replicas_and_caches_and_evaluated_modules_may_change() -> None:
    model, replica = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    teacher, state, rows = nn.BatchNorm1d(2).eval(), OutsideState(model), torch.randn(4, 2)
    with state.unchanged(None, model), state.unchanged(None, replica):
        model(teacher(rows)), replica(rows), Centered(persistent=False)(torch.randn(4, 16))


def test_buffers_outside_of_the_model_are_compared_again_with_another_forward_function() -> None:
    model, critic, state = nn.Linear(2, 2), nn.BatchNorm1d(2), OutsideState(nn.Linear(2, 2))
    with state.unchanged(None, model):
        pass
    with pytest.raises(InputError), state.unchanged(critic, model):
        critic(torch.randn(4, 2))


class Annealed:
    """Trainer whose forward function counts its calls."""

    def __init__(self) -> None:
        self.weight, self.rate = 0.0, 0.1

    def forward(self) -> None:
        self.weight += self.rate

    __call__ = forward


@pytest.mark.parametrize("function", [Annealed(), Annealed().forward])
def test_number_in_an_attribute_of_the_object_of_the_forward_function_is_covered(function: Callable[[], None]) -> None:
    with pytest.raises(InputError) as caught, OutsideState(nn.Linear(2, 2)).unchanged(function):
        function()
    assert caught.value.value.endswith("the variable Annealed.weight")
    with pytest.raises(InputError), OutsideState(nn.Linear(2, 2), function).unchanged(None):
        function()
