"""Every sample is in one shard and every shard has one owner."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.sharding import owned_shards, require_enough_shards, shard_bounds

sizes = st.integers(0, 5000)
counts = st.integers(1, 200)


@given(sizes, counts)
def test_shards_are_a_batch_in_order(size: int, shards: int) -> None:
    bounds = shard_bounds(size, shards)
    assert len(bounds) == shards
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@given(sizes, counts)
def test_shard_sizes_differ_by_at_most_one(size: int, shards: int) -> None:
    lengths = [stop - start for start, stop in shard_bounds(size, shards)]
    assert max(lengths) - min(lengths) <= 1


@given(counts, st.integers(1, 64))
def test_ranks_share_all_shards(shards: int, ranks: int) -> None:
    owned = [number for rank in range(ranks) for number in owned_shards(shards, ranks, rank)]
    assert owned == list(range(shards))


@given(counts, st.integers(1, 64))
def test_loads_differ_by_at_most_one_shard(shards: int, ranks: int) -> None:
    loads = [len(owned_shards(shards, ranks, rank)) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


def test_known_slices() -> None:
    assert shard_bounds(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [list(owned_shards(8, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@given(counts)
def test_a_rank_a_shard_is_enough(shards: int) -> None:
    require_enough_shards(shards, shards)
    with pytest.raises(InputError):
        require_enough_shards(shards, shards + 1)


def test_refusal_gives_value_rule_and_way_out() -> None:
    with pytest.raises(InputError) as refused:
        require_enough_shards(4, 6)
    assert str(refused.value) == (
        "6 ranks share the data but the recipe has 4 shards, so 2 ranks would have nothing to do.\n"
        "  rule: ranks that share the data <= shards\n"
        "  do:   --processes 4, or set shards: 6 (this changes batch-norm groups and dropout, so results change)"
    )


def test_refusal_counts_one_idle_rank_in_the_singular() -> None:
    with pytest.raises(InputError, match="so 1 rank would have nothing to do"):
        require_enough_shards(4, 5)
