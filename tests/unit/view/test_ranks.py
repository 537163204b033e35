"""Messages between ranks, and the rows that each owns."""

from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs
from samestep.view.ranks import rank_bounds


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("microbatches", [8, 12])
@pytest.mark.parametrize("rows", [8, 11, 12, 13, 64, 100])
def test_ranks_own_all_rows_in_order(rows: int, microbatches: int, size: int) -> None:
    bounds = rank_bounds(rows, microbatches, size)
    assert [start for start, _ in bounds] == [0, *[stop for _, stop in bounds[:-1]]]
    assert bounds[-1][1] == rows
    for rank, (start, stop) in enumerate(bounds):
        assert start == rows * (microbatches * rank // size) // microbatches
        assert stop == rows * (microbatches * (rank + 1) // size) // microbatches


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


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.slow), 4])
def results(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    (found,) = run_jobs("workers.view_ranks", Job("run", request.param, {}))
    return request.param, found


def test_words_have_64_bits(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    expected = [[rank, -(2**63) + rank, 2**62 - rank] for rank in range(size)]
    assert found["words"] == [expected] * size


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "complex128"])
@pytest.mark.parametrize("elements", ["few", "many"])
def test_sums(results: tuple[int, dict[str, Any]], dtype: str, elements: str) -> None:
    size, found = results
    assert found[f"sum of {elements} {dtype}"] == [[True, True, True]] * size


@pytest.mark.parametrize("shape", ["no dimensions", "transposed", "empty", "conjugate", "negative"])
def test_sums_of_any_layout(results: tuple[int, dict[str, Any]], shape: str) -> None:
    size, found = results
    assert found[f"sum, {shape}"] == [True] * size


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "bool", "int64", "uint8", "complex128", "conjugate"])
@pytest.mark.parametrize("rows", ["equal", "unequal", "none on one rank", "two per row", "many"])
def test_rows_of_all_ranks(results: tuple[int, dict[str, Any]], rows: str, dtype: str) -> None:
    size, found = results
    assert found[f"{rows} {dtype}"] == [True] * size


def test_a_started_sum_is_in_place(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    assert found["started"] == [[[float(size)] * 3, [10.0 * size]]] * size
