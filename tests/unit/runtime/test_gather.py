"""Small things that ranks tell each other arrive on every rank as they were given."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ranks_gather
import samestep
from ranks_gather import COUNTS, GIVEN
from samestep.errors import EXIT_INPUT, InputError
from samestep.runtime.crew import RankError
from samestep.runtime.launch import launch
from samestep.runtime.world import World

RANKS = 3


@pytest.fixture(scope="module")
def got() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = launch(ranks_gather.run_all, processes=RANKS)
    return found


@pytest.mark.parametrize("name", GIVEN)
def test_every_rank_gets_what_every_rank_gives(got: dict[str, list[Any]], name: str) -> None:
    assert got[name] == [GIVEN[name]] * RANKS


def test_means_are_over_all_that_was_counted(got: dict[str, list[Any]]) -> None:
    """Ranks have 3, 0 and 5 samples; what the one without any says does not count, not even that it is no number."""
    assert all(means == got["means"][0] for means in got["means"]), "the same bits on every rank"
    means = got["means"][0]
    assert list(means) == ["a", "b"]
    assert means["a"] == (3 * 1.0 + 5 * 4.0) / 8
    assert means["b"] == pytest.approx((3 * 0.1 + 5 * 0.3) / 8)
    assert sum(COUNTS) == 8


def test_means_without_counts_are_plain(got: dict[str, list[Any]]) -> None:
    assert got["plain means"] == [{"rank": 1.0}] * RANKS
    assert got["no values"] == [{}] * RANKS


def test_different_names_and_nothing_counted_are_refused_on_every_rank(got: dict[str, list[Any]]) -> None:
    names, nothing = got["refused"][0]
    assert names == "reduce_dict: rank 1 has the names rank 1, rank 0 has rank 0"
    assert nothing == "reduce_dict: no rank has counted anything"
    assert got["refused"] == [[names, nothing]] * RANKS


def test_rank_that_gives_something_else_ends_the_run_with_its_reason() -> None:
    with pytest.raises(RankError, match="all_gather was given what JSON cannot say") as failed:
        launch(ranks_gather.give_a_set, processes=RANKS)
    assert failed.value.exit_code == EXIT_INPUT


@pytest.mark.parametrize("value", [{1}, b"x", object(), torch.ones(2), {(1, 2): 3}, {1: 2}, [({"a": {None: 0}},)]])
def test_what_json_cannot_say_is_refused(alone: World, value: Any) -> None:
    with pytest.raises(InputError, match="what JSON cannot say") as error:
        samestep.all_gather(value, alone)
    assert "tensor.tolist()" in str(error.value.rule)


def test_a_cycle_is_refused(alone: World) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(InputError, match="what JSON cannot say"):
        samestep.all_gather(cyclic, alone)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the world keeps nothing between examples
@given(value=plain)
def test_anything_plain_comes_back_as_it_was(alone: World, value: Any) -> None:
    (found,) = samestep.all_gather(value, alone)
    assert json.dumps(found) == json.dumps(value)


def test_numbers_that_are_none_keep_their_kind(alone: World) -> None:
    (found,) = samestep.all_gather([math.inf, -math.inf, math.nan], alone)
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert math.isnan(samestep.reduce_dict({"a": math.nan}, alone)["a"])
