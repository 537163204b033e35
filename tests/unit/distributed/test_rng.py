"""Seeds derived from a purpose and global facts, and preserved generators."""

import random
from contextlib import nullcontext
from itertools import product
from typing import get_args

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random.mtrand import set_bit_generator

from samestep.distributed.rng import (
    Purpose,
    derive_seed,
    passed_generators,
    preserved_generators,
    seed_generators,
)

words = st.integers(0, 2**64 - 1)


def draws() -> tuple[float, float, float]:
    """Return one number from each generator of the process."""
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_seeds_never_change() -> None:
    assert derive_seed("order", 0, 0) == 12174131014002871997
    assert derive_seed("sample", 0, 0) == 10275630656003848052
    assert derive_seed("collate", 0, 0) == 10001446222821279337
    assert derive_seed("shard", 1, 2, 3) == 785424411859148130
    assert derive_seed("evaluation", 0, 0) == 16626789707541066645
    assert derive_seed("model", 0, 0) == 17942508330236404372


def test_purposes_order_and_number_of_facts_matter() -> None:
    purposes = get_args(Purpose)
    assert len({derive_seed(purpose, 1, 2, 3) for purpose in purposes}) == len(purposes)
    assert len({derive_seed("shard", *facts) for facts in product(range(8), repeat=3)}) == 8**3
    assert len({derive_seed("shard", *[0] * count) for count in range(6)}) == 6


@given(words)
def test_seeding_sets_every_generator(seed: int) -> None:
    with preserved_generators():
        seed_generators(seed)
        first = draws()
        draws()
        seed_generators(seed)
        assert draws() == first


@pytest.mark.parametrize("error", [None, ValueError("inside")])
def test_generators_are_restored(error: Exception | None) -> None:
    with preserved_generators():
        seed_generators(7)
        expected = draws(), draws()
        seed_generators(7)
        first = draws()
        with nullcontext() if error is None else pytest.raises(ValueError), preserved_generators():
            seed_generators(8)
            assert draws() not in expected
            if error is not None:
                raise error
        assert (first, draws()) == expected


def gaussians() -> tuple[float, float]:
    """Return numbers that the generators of Python and NumPy draw in pairs."""
    return random.gauss(), float(numpy.random.normal())


@pytest.mark.parametrize("kind", [numpy.random.MT19937, numpy.random.PCG64, numpy.random.SFC64, numpy.random.Philox])
def test_a_passed_state_continues_the_sequence_of_each_generator(kind: type[numpy.random.BitGenerator]) -> None:
    with preserved_generators():
        set_bit_generator(kind(3))
        seed_generators(5)
        draws(), gaussians()
        states = [generator.state() for generator in passed_generators(torch.device("cpu"))]
        expected = gaussians(), draws()
        seed_generators(6)
        for generator, state in zip(passed_generators(torch.device("cpu")), states, strict=True):
            generator.set_state(state)
        assert (gaussians(), draws()) == expected
