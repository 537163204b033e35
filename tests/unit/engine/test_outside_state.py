"""Numbers and generators outside of a model, which a forward leaves unchanged."""

import random
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
from torch import nn

from samestep.engine.outside_state import OutsideState
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
