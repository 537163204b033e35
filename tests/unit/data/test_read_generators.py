"""Generators around reads: found, seeded, preserved, and watched for draws."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from samestep.data.read_generators import OwnGenerators, WatchedGenerators, sample_number


class Holder:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self.count = 0


def transform(rng: Any) -> Callable[[], float]:
    def draw() -> float:
        return float(rng.random()) + 1

    return draw


@pytest.mark.parametrize(
    "hidden",
    [
        Holder,
        lambda rng: {"a": [Holder((rng,))]},
        transform,
        lambda rng: functools.partial(transform, rng),
        lambda rng: Holder(rng).__init__,  # type: ignore[misc]
        lambda rng: getattr(rng, "random", None),
    ],
)
def test_generators_are_found(hidden: Callable[[Any], Any]) -> None:
    assert OwnGenerators(hidden(random.Random(1)))
    assert not OwnGenerators(hidden(3))


def test_owned_generators_are_seeded_apart_and_preserved() -> None:
    torch_one, python, legacy = torch.Generator(), random.Random(1), numpy.random.RandomState(1)
    new = numpy.random.default_rng(1)

    def draws() -> list[float]:
        return [float(torch.rand((), generator=torch_one)), python.random(), legacy.rand(), new.random()]

    own = OwnGenerators(Holder(torch_one, python, legacy, new))
    before = draws()
    with own.preserved():
        own.seed("sample", 5, 0, 0, 0)
        first = draws()
        own.seed("sample", 5, 0, 0, 0)
        assert draws() == first
        own.seed("sample", 6, 0, 0, 0)
        assert not set(draws()) & set(first)
    assert len(set(first)) == len(before)
    own.seed("sample", 7, 0, 0, 0)
    expected = draws()
    own.seed("sample", 7, 0, 0, 0)
    with own.preserved():
        draws()
    assert draws() == expected


@pytest.mark.parametrize(
    "draw", [random.random, numpy.random.rand, lambda: torch.rand(()), numpy.random.randn, random.gauss]
)
def test_draws_are_noticed_and_undone(draw: Callable[[], Any]) -> None:
    if draw is random.gauss:
        draw = functools.partial(random.gauss, 0, 1)
    watched = WatchedGenerators()
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    with watched:
        assert not watched.have_drawn()
        draw()
        assert watched.have_drawn()
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == before


def test_any_index_is_a_number() -> None:
    assert (sample_number(5), sample_number(numpy.int64(5)), sample_number(-1)) == (5, 5, 2**64 - 1)
    names = [sample_number(name) for name in ("a", "b", ("a", 1), "\ud800")]
    assert len(set(names)) == 4
    assert sample_number("a") == 16860193610431497119


def test_reads_without_draws_leave_the_second_gaussian_number() -> None:
    numpy.random.seed(0)
    plain = numpy.random.randn(3).tolist()
    numpy.random.seed(0)
    draws = [numpy.random.randn()]
    with WatchedGenerators():
        pass
    draws.append(numpy.random.randn())
    with WatchedGenerators():
        numpy.random.randn()
    assert [*draws, numpy.random.randn()] == plain
