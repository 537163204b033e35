"""Own rows of each rank in a batch that is divided into microbatches."""

from itertools import product

import pytest

from samestep.view.slices import rank_bounds


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
