"""Division of batches into microbatches, their owners, and the refusal of too many ranks."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.microbatches import microbatch_bounds, owned_microbatches, rank_bounds, require_microbatches

sizes = st.integers(0, 5000)
counts = st.integers(1, 200)


@given(sizes, counts)
def test_microbatches_are_contiguous_slices_of_the_batch(size: int, microbatches: int) -> None:
    bounds = microbatch_bounds(size, microbatches)
    assert len(bounds) == microbatches
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@given(sizes, counts)
def test_microbatch_sizes_differ_by_at_most_one(size: int, microbatches: int) -> None:
    lengths = [stop - start for start, stop in microbatch_bounds(size, microbatches)]
    assert max(lengths) - min(lengths) <= 1


@given(counts, st.integers(1, 64))
def test_each_microbatch_has_one_owner(microbatches: int, ranks: int) -> None:
    owned = [number for rank in range(ranks) for number in owned_microbatches(microbatches, ranks, rank)]
    assert owned == list(range(microbatches))


@given(counts, st.integers(1, 64))
def test_loads_differ_by_at_most_one_microbatch(microbatches: int, ranks: int) -> None:
    loads = [len(owned_microbatches(microbatches, ranks, rank)) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1


def test_known_slices() -> None:
    assert microbatch_bounds(10, 4) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [list(owned_microbatches(8, 3, rank)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize(("microbatches", "size"), [(None, 9), (4, 5), (1, 2)])
def test_more_ranks_than_microbatches_are_refused(microbatches: int | None, size: int) -> None:
    with pytest.raises(InputError) as caught:
        require_microbatches(microbatches, size)
    assert caught.value.code == "E_TOO_MANY_RANKS"


@pytest.mark.parametrize(("microbatches", "size"), [(None, 8), (9, 9), (16, 5), (None, 1)])
def test_a_microbatch_for_each_rank_is_enough(microbatches: int | None, size: int) -> None:
    require_microbatches(microbatches, size)


def test_ranks_own_all_rows_in_order() -> None:
    for rows, microbatches, size in product((8, 11, 12, 13, 64, 100), (8, 12), (1, 2, 3, 4, 7, 8)):
        bounds = rank_bounds(rows, microbatches, size)
        assert [start for start, _ in bounds] == [0, *[stop for _, stop in bounds[:-1]]]
        assert bounds[-1][1] == rows


@pytest.mark.parametrize(
    ("rows", "microbatches", "size", "own"),
    [
        (11, 8, 4, [2, 3, 3, 3]),
        (11, 8, 3, [2, 4, 5]),
        (9, 8, 2, [4, 5]),
        (8, 8, 3, [2, 3, 3]),
        (4, 8, 4, [1, 1, 1, 1]),
        (3, 8, 3, [0, 1, 2]),
        (5, 5, 5, [1, 1, 1, 1, 1]),
        (12, 3, 3, [4, 4, 4]),
    ],
)
def test_own_rows(rows: int, microbatches: int, size: int, own: list[int]) -> None:
    assert [stop - start for start, stop in rank_bounds(rows, microbatches, size)] == own
