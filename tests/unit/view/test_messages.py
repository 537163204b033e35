"""Messages between ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

import samestep
from helpers.forked_ranks import Job, run_jobs
from samestep.view.messages import Ranks


def run() -> dict[str, list[Any]]:
    """Return for each message the result of the ranks."""
    world = samestep.init(threads=1)
    ranks = Ranks(world)
    found: dict[str, Any] = {"words": ranks.words([ranks.rank, -(2**63) + ranks.rank, 2**62 - ranks.rank])}
    _sums(ranks, found)
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.uint8, torch.complex128):
        _rows(ranks, dtype, found)
    values = [torch.ones(3), torch.tensor([10.0])]
    works = [ranks.start_sum(value) for value in values]
    for work in works:
        ranks.wait(work)
    found["started"] = [value.tolist() for value in values]
    return {name: samestep.all_gather(value, world) for name, value in found.items()}


def _sums(ranks: Ranks, found: dict[str, Any]) -> None:
    factor = sum(range(1, ranks.size + 1))
    for elements, count in (("few", 7), ("many", 20_000)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128):
            base = (torch.arange(count) % 5).to(dtype)
            own = base * (ranks.rank + 1)
            before = own.clone()
            total = ranks.sum(own)
            found[f"sum of {elements} {str(dtype)[6:]}"] = [
                torch.equal(total, base * factor),
                total.dtype == dtype,
                torch.equal(own, before) and total.data_ptr() != own.data_ptr(),
            ]
    matrix = torch.arange(6.0).view(2, 3).t()
    found["sum, transposed"] = torch.equal(ranks.sum(matrix), matrix * ranks.size)
    found["sum, no dimensions"] = torch.equal(ranks.sum(torch.tensor(2.0)), torch.tensor(2.0 * ranks.size))
    imaginary = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    found["sum, conjugate"] = torch.equal(
        ranks.sum(imaginary.conj()), (imaginary.real - 1j * imaginary.imag) * ranks.size
    )
    found["sum, negative"] = torch.equal(ranks.sum(imaginary.conj().imag), -imaginary.imag * ranks.size)
    found["sum, empty"] = ranks.sum(torch.ones(0, 3)).shape == (0, 3)


def _rows(ranks: Ranks, dtype: torch.dtype, found: dict[str, Any]) -> None:
    cases = {
        "equal": ([2] * ranks.size, 1, (3, 2)),
        "unequal": ([1 + rank for rank in range(ranks.size)], 1, (3,)),
        "none on one rank": ([0, *[2] * (ranks.size - 1)], 1, ()),
        "two per row": ([1 + rank for rank in range(ranks.size)], 2, (2,)),
        "many": ([30 + rank for rank in range(ranks.size)], 1, (3000,)),
    }
    for name, (counts, factor, shape) in cases.items():
        stops = [sum(counts[: rank + 1]) for rank in range(ranks.size)]
        bounds = [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
        numbers = torch.arange(stops[-1] * factor * (torch.Size(shape).numel())) % 3
        whole = _of_dtype(numbers.view(-1, *shape), dtype)
        start, stop = bounds[ranks.rank]
        gathered = ranks.gather_rows([whole[start * factor : stop * factor]], bounds, factor)
        found[f"{name} {str(dtype)[6:]}"] = gathered.dtype == dtype and torch.equal(gathered, whole)
        if dtype == torch.complex128:
            conjugate = ranks.gather_rows([(whole * 1j)[start * factor : stop * factor].conj()], bounds, factor)
            found[f"{name} conjugate"] = torch.equal(conjugate, whole * -1j)


def _of_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers == 1 if dtype == torch.bool else numbers.to(dtype)


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.long), 4])
def results(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    (found,) = run_jobs("unit.view.test_messages", Job("run", request.param, {}))
    return request.param, found


def test_words_have_64_bits(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    expected = [[rank, -(2**63) + rank, 2**62 - rank] for rank in range(size)]
    assert found["words"] == [expected] * size


def test_sums(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    sums = {name: value for name, value in found.items() if name.startswith("sum of ")}
    assert sums == dict.fromkeys(sums, [[True, True, True]] * size)
    assert len(sums) == 2 * 5


def test_sums_of_any_layout(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    for shape in ("no dimensions", "transposed", "empty", "conjugate", "negative"):
        assert found[f"sum, {shape}"] == [True] * size, shape


@pytest.mark.parametrize("rows", ["equal", "unequal", "none on one rank", "two per row", "many"])
def test_rows_of_all_ranks(results: tuple[int, dict[str, Any]], rows: str) -> None:
    size, found = results
    for dtype in ("float64", "bfloat16", "bool", "int64", "uint8", "complex128", "conjugate"):
        assert found[f"{rows} {dtype}"] == [True] * size, dtype


def test_a_started_sum_is_in_place(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    assert found["started"] == [[[float(size)] * 3, [10.0 * size]]] * size
