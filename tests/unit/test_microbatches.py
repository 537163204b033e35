"""Division of batches into microbatches, their owners, and the refusal of too many ranks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.microbatches import (
    microbatch_bounds,
    owned_microbatches,
    require_enough_microbatches,
    require_microbatches,
)

sizes = st.integers(0, 5000)
counts = st.integers(1, 200)


@given(sizes, counts)
def test_microbatches_are_contiguous_slices_of_almost_equal_size(size: int, microbatches: int) -> None:
    bounds = microbatch_bounds(size, microbatches)
    assert len(bounds) == microbatches
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


@given(counts, st.integers(1, 64))
def test_each_microbatch_has_one_owner_and_loads_differ_by_at_most_one(microbatches: int, ranks: int) -> None:
    owned = [owned_microbatches(microbatches, ranks, rank) for rank in range(ranks)]
    assert [number for own in owned for number in own] == list(range(microbatches))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_known_slices() -> None:
    assert microbatch_bounds(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [list(owned_microbatches(8, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@given(counts)
def test_one_microbatch_per_rank_is_enough(microbatches: int) -> None:
    require_enough_microbatches(microbatches, microbatches)
    with pytest.raises(InputError):
        require_enough_microbatches(microbatches, microbatches + 1)


@pytest.mark.parametrize(("microbatches", "size"), [(None, 9), (4, 5), (1, 2)])
def test_more_ranks_than_microbatches_are_refused(microbatches: int | None, size: int) -> None:
    with pytest.raises(InputError) as caught:
        require_microbatches(microbatches, size)
    assert caught.value.code == "E_TOO_MANY_RANKS"


@pytest.mark.parametrize(("microbatches", "size"), [(None, 8), (9, 9), (16, 5), (None, 1)])
def test_a_microbatch_for_each_rank_is_enough(microbatches: int | None, size: int) -> None:
    require_microbatches(microbatches, size)
