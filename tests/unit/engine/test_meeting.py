"""Shards meet at the same place, or are told that they do not."""

import math
from typing import Any

import pytest
import torch

from lockstep import ONE_RANK
from samestep.engine.meeting import Meetings, Message
from samestep.errors import InputError
from samestep.parallel.tree import ShardTree

LAYERS = ["first", "second"]


def meetings(shards: int = 3, samples: int = 9) -> Meetings:
    filled = [shard for shard in range(shards) if ShardTree(shards, samples).has_samples((shard, shard + 1))]
    return Meetings(ONE_RANK, None, ShardTree(shards, samples), filled, LAYERS, 4)


def message(values: list[float], layer: int = 0, direction: Any = "forward", count: int = 2) -> Message:
    return Message(layer, direction, count, torch.tensor(values, dtype=torch.float64), lambda n, v: (n, v.clone()))


def test_every_shard_has_a_row() -> None:
    counts, values = meetings()([message([1, 2]), message([3, 4], count=5), message([5, 6])])
    assert counts.tolist() == [[2], [5], [2]]
    assert values.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_shard_without_samples_has_a_row_of_zeros() -> None:
    counts, values = meetings(samples=2)([message([1, 2]), message([3, 4])])
    assert counts.tolist() == [[0], [2], [2]]
    assert values.tolist() == [[0, 0], [1, 2], [3, 4]]


def test_zero_has_no_sign() -> None:
    """A rank that receives a row adds it to zeros; so does the one that sends it."""
    _, values = meetings()([message([-0.0])] * 3)
    assert [math.copysign(1, value) for value in values.flatten().tolist()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (message([1], layer=1), "shard 2 is at the forward of the norm layer 'second'"),
        (message([1], direction="backward"), "shard 2 is at the backward of the norm layer 'first'"),
        (None, "shard 2 is done"),
    ],
)
def test_shards_at_different_places_are_refused(other: Message | None, told: str) -> None:
    with pytest.raises(InputError) as refused:
        meetings()([message([1]), message([1]), other])
    assert refused.value.value == f"shard 0 is at the forward of the norm layer 'first' while {told}"
    assert refused.value.rule
    assert refused.value.do


def test_nothing_comes_of_the_last_meeting() -> None:
    assert meetings()([None] * 3) is None


def test_the_first_meeting_with_bad_numbers_is_remembered() -> None:
    met = meetings()
    met([message([1])] * 3)
    assert (met.bad, met.bad_direction) == ([], None)
    met([message([1], 1), message([math.nan], 1), message([1], 1)])
    met([message([math.inf], 1, "backward")] * 3)
    met([None] * 3)
    assert (met.bad, met.bad_direction) == ([1], "forward")


def test_bad_numbers_of_backward_are_told_apart() -> None:
    met = meetings()
    met([message([1], 1, "backward"), message([1], 1, "backward"), message([-math.inf], 1, "backward")])
    assert (met.bad, met.bad_direction) == ([2], "backward")
