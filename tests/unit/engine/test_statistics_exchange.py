"""Exchange of batch norm statistics between microbatches."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from helpers.lockstep import ONE_RANK
from helpers.waits import Waits
from samestep.engine.statistics_exchange import Message, StatisticsExchange
from samestep.errors import InputError
from samestep.strategies.reduction import MicrobatchTree

LAYERS = ["first", "second"]


def exchange_of(microbatches: int = 3, samples: int = 9, plan: Sequence[int] = ()) -> StatisticsExchange:
    filled = [
        microbatch
        for microbatch in range(microbatches)
        if MicrobatchTree(microbatches, samples).has_samples((microbatch, microbatch + 1))
    ]
    return StatisticsExchange(ONE_RANK, None, MicrobatchTree(microbatches, samples), filled, LAYERS, 4, list(plan))


def message(values: list[float], layer: int = 0, direction: Any = "forward", count: int = 2) -> Message:
    return Message(layer, direction, count, torch.tensor(values, dtype=torch.float64), lambda n, v: (n, v.clone()))


def test_result_has_one_row_per_microbatch() -> None:
    counts, values = exchange_of()([message([1, 2]), message([3, 4], count=5), message([5, 6])])
    assert counts.tolist() == [[2], [5], [2]]
    assert values.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_microbatch_without_samples_has_a_row_of_zeros() -> None:
    counts, values = exchange_of(samples=2)([message([1, 2]), message([3, 4])])
    assert counts.tolist() == [[0], [2], [2]]
    assert values.tolist() == [[0, 0], [1, 2], [3, 4]]


def test_negative_zero_becomes_positive() -> None:
    """Rows of other ranks are added to zeros, and so are rows of this rank."""
    _, values = exchange_of()([message([-0.0])] * 3)
    assert [math.copysign(1, value) for value in values.flatten().tolist()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("other", "location"),
    [
        (message([1], layer=1), "microbatch 2 is at the forward of the norm layer 'second'"),
        (message([1], direction="backward"), "microbatch 2 is at the backward of the norm layer 'first'"),
        (None, "microbatch 2 is done"),
    ],
)
def test_microbatches_at_different_layers_are_refused(other: Message | None, location: str) -> None:
    with pytest.raises(InputError) as error:
        exchange_of()([message([1]), message([1]), other])
    assert error.value.value == f"microbatch 0 is at the forward of the norm layer 'first' while {location}"
    assert error.value.code == "E_NORM_LAYER"


def test_last_exchange_returns_none() -> None:
    assert exchange_of()([None] * 3) is None


def test_first_exchange_with_non_finite_values_is_recorded() -> None:
    exchange = exchange_of()
    exchange([message([1])] * 3)
    assert (exchange.bad, exchange.bad_direction) == ([], None)
    exchange([message([1], 1), message([math.nan], 1), message([1], 1)])
    exchange([message([math.inf], 1, "backward")] * 3)
    exchange([None] * 3)
    assert (exchange.bad, exchange.bad_direction) == ([1], "forward")


def test_non_finite_values_of_the_backward_are_recorded() -> None:
    exchange = exchange_of()
    exchange([message([1], 1, "backward"), message([1], 1, "backward"), message([-math.inf], 1, "backward")])
    assert (exchange.bad, exchange.bad_direction) == ([2], "backward")


def test_host_reads_at_the_end_if_the_exchanges_are_those_of_the_last_step() -> None:
    first = exchange_of()
    for part in ([message([1])] * 3, [message([1], 1)] * 3, [None] * 3):
        first(part)
    second = exchange_of(plan=first.codes)
    with Waits() as waits:
        second([message([1])] * 3)
        second([message([math.nan], 1), message([1], 1), message([1], 1)])
        assert not waits.calls
        second([None] * 3)
    assert waits.calls == {"tolist": 1}
    assert (second.bad, second.bad_direction) == ([0], "forward")


def test_host_reads_at_once_at_another_layer_than_in_the_last_step() -> None:
    exchange = exchange_of(plan=[message([1]).code, 1])
    with Waits() as waits:
        exchange([message([1], 1)] * 3)
    assert waits.calls == {"tolist": 1}
    with pytest.raises(InputError, match="microbatch 2 is done"):
        exchange([message([1], 1), message([1], 1), None])


def test_one_value_per_channel_is_refused() -> None:
    with pytest.raises(InputError, match="one value per channel"):
        exchange_of(samples=1)([message([1], count=1)])
