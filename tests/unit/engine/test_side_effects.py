"""Side effects of a forward: numbers, generators and buffers outside of the model do not change."""

import random
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.nn.modules import module

from samestep.engine.side_effects import OutsideState
from samestep.errors import InputError

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


def test_buffers_outside_of_a_compiled_model_are_not_compared() -> None:
    model, critic = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model.compile(backend="eager")
    with OutsideState(model).unchanged(None, model):
        assert not module._global_forward_pre_hooks  # a hook would be compiled, and the model again without it
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
