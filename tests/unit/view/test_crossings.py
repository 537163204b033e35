"""Crossings and their derivatives, and sums inside of divided calls that ranks may leave, on ranks that are threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.microbatches import Slices
from samestep.reduce.fast import FastReduction
from samestep.view.crossings import CallAbandoned, CallExchange, RowBounds, Sum, cut, enter, gather, leave, totals

BOUNDS = {3: [(0, 1), (1, 4), (4, 6)], 4: [(0, 2), (2, 3), (3, 5), (5, 6)]}
SIZES = pytest.mark.parametrize("size", [3, 4])


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def rows_of(ranks: ThreadRanks, factor: int = 1) -> RowBounds:
    return RowBounds(ranks, Slices(BOUNDS[ranks.size], ranks.size, ranks.rank), factor)


@SIZES
@pytest.mark.parametrize("factor", [1, 2])
def test_the_gradient_of_cut_rows_is_gathered(size: int, factor: int) -> None:
    weights = leaf(6 * factor, 2, seed=1).detach()

    def compute(ranks: ThreadRanks) -> Any:
        whole = leaf(6 * factor, 2)
        rows = rows_of(ranks, factor)
        own = cut(whole, rows)[0]
        assert torch.equal(own, rows.own(whole)[0])
        (own * rows.own(weights)[0]).sum().backward()
        return whole.grad

    for gradient in on_ranks(size, compute):
        assert torch.equal(gradient, weights)


def test_rows_without_a_graph_share_the_memory_of_the_whole() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        rows = rows_of(ranks)
        plain = leaf(6, 2).detach()
        whole = leaf(6, 2)
        with torch.no_grad():
            without = cut(whole, rows)[0]
        assert without.grad_fn is None
        return cut(plain, rows)[0].data_ptr() == plain[rows.slices.own_bounds[0][0] :].data_ptr()

    assert on_ranks(3, compute) == [True] * 3


def network(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a function of rows that uses the mean of a value over all rows."""
    return torch.tanh((x - mean) @ weight) ** 2


@SIZES
def test_first_and_second_derivatives_are_those_of_the_whole(size: int) -> None:
    """A penalty on the gradients of inputs and parameters, through all crossings."""

    def penalty(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        first = torch.autograd.grad((y**3).sum(), [x, weight], create_graph=True)
        penalty = (first[0] ** 2).sum() * (first[1] ** 2).sum().sqrt()
        return [y, *first, *torch.autograd.grad(penalty, [x, weight])]

    x, weight = leaf(6, 3), leaf(3, 2, seed=1)
    expected = penalty(x, weight, network(x, weight, (x**2).sum(0) / 6))

    def compute(ranks: ThreadRanks) -> Any:
        x, weight = leaf(6, 3), leaf(3, 2, seed=1)
        rows = rows_of(ranks)
        own = cut(x, rows)[0]
        inside = enter(weight, FastReduction(ranks), 1)[0]
        y = gather([network(own, inside, totals(FastReduction(ranks), [(own**2).sum(0)])[0] / 6)], rows)
        return penalty(x, weight, y)

    for found in on_ranks(size, compute):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@SIZES
def test_a_scalar_that_leaves_has_second_derivatives(size: int) -> None:
    weight = leaf(3)

    def second(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(loss**2, weight, create_graph=True)
        return torch.autograd.grad((first**2).sum(), weight)[0]

    expected = second(sum((weight**2 * (rank + 1)).sum() for rank in range(size)), weight)

    def compute(ranks: ThreadRanks) -> Any:
        weight = leaf(3)
        part = (enter(weight, FastReduction(ranks), 1)[0] ** 2 * (ranks.rank + 1)).sum()
        return second(leave([part], FastReduction(ranks)), weight)

    for found in on_ranks(size, compute):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


CPU = torch.device("cpu")


def exchange_of(ranks: ThreadRanks, expected: tuple[Sum, ...] | None) -> CallExchange:
    def all_are_here() -> bool:
        return all(word == [1] for word in ranks.words([1]))

    return CallExchange(FastReduction(ranks), expected, all_are_here)


def outcomes(
    size: int, expected: tuple[Sum, ...] | None, compute: Callable[[int, CallExchange], Any]
) -> list[tuple[Any, CallExchange]]:
    """Return for each rank the result of `compute`, or the kind of its exception, and the exchange."""

    def run(ranks: ThreadRanks) -> tuple[Any, CallExchange]:
        exchange = exchange_of(ranks, expected)
        try:
            return compute(ranks.rank, exchange), exchange
        except CallAbandoned:
            exchange.leave(CPU)
            return "abandoned", exchange
        except ZeroDivisionError:
            exchange.leave(CPU)
            return "failed", exchange

    return on_ranks(size, run)


def floats(*elements: int) -> tuple[Sum, ...]:
    return tuple((number, torch.float32) for number in elements)


def two_sums(rank: int, exchange: CallExchange) -> Any:
    first = exchange.join(totals, torch.full((2, 3), rank + 0.5))
    return float(exchange.join(totals, first.sum()))


@pytest.mark.parametrize("expected", [None, floats(6, 1)], ids=["first call", "later call"])
@pytest.mark.parametrize("size", [3, 4])
def test_sums_of_all_ranks(size: int, expected: tuple[Sum, ...] | None) -> None:
    total = sum(rank + 0.5 for rank in range(size)) * 6 * size
    for result, exchange in outcomes(size, expected, two_sums):
        assert result == total
        assert tuple(exchange.sums) == floats(6, 1)
        assert not exchange.is_known_to_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("is_first", [True, False])
def test_sums_keep_dtype_and_shape(dtype: torch.dtype, is_first: bool) -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        value = exchange.sum([torch.ones(2, 2, dtype=dtype)])
        return value.dtype == dtype and value.tolist() == [[3, 3], [3, 3]]

    expected = None if is_first else ((4, dtype),)
    assert [result for result, _ in outcomes(3, expected, compute)] == [True] * 3


def test_halves_are_rounded_once() -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        return exchange.sum([torch.tensor([256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)]).item()

    assert [result for result, _ in outcomes(3, None, compute)] == [258.0] * 3  # 256 + 1 is 256 in bfloat16


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_no_rank_waits_for_one_that_fails(failing: int, after: int) -> None:
    """Before the first sum of a known kind, between its sums, and after them; the others end the forward."""

    def compute(rank: int, exchange: CallExchange) -> Any:
        for number, elements in enumerate([6, 1, 2]):
            if rank == failing and number == after:
                raise ZeroDivisionError
            exchange.sum([torch.ones(elements)])
        return "done"

    found = outcomes(3, floats(6, 1, 2), compute)
    assert [result for result, _ in found] == ["failed" if rank == failing else "done" for rank in range(3)]
    assert [tuple(exchange.sums) for _, exchange in found] == [floats(6, 1, 2)] * 3


def test_two_ranks_may_fail_at_once() -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        exchange.sum([torch.ones(5)])
        if rank != 1:
            raise ZeroDivisionError
        exchange.sum([torch.ones(5)])
        return "done"

    assert [result for result, _ in outcomes(3, floats(5, 5), compute)] == ["failed", "done", "failed"]


@pytest.mark.parametrize("elements", [[5], [6, 2], [6, 1, 1], [6]], ids=["size", "second size", "one more", "one less"])
def test_sums_that_the_kind_does_not_have_abandon_the_call(elements: list[int]) -> None:
    """On this rank; the word at the end of the call tells the others."""

    def compute(rank: int, exchange: CallExchange) -> Any:
        for number in elements if rank == 1 else [6, 1]:
            exchange.sum([torch.ones(number)])
        exchange.require_all_sums()
        return "done"

    assert [result for result, _ in outcomes(3, floats(6, 1), compute)] == ["done", "abandoned", "done"]


def test_a_sum_of_another_dtype_abandons_the_call() -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        exchange.sum([torch.ones(6, dtype=torch.float64 if rank == 1 else torch.float32)])
        return "done"

    assert [result for result, _ in outcomes(3, floats(6), compute)] == ["done", "abandoned", "done"]


def test_a_rank_leaves_some_sums_before_others() -> None:
    """Messages of a strategy are between the sums."""

    def compute(rank: int, exchange: CallExchange) -> Any:
        if rank == 0:
            exchange.leave(CPU, 2)
            before = len(exchange.sums)
            exchange.leave(CPU)
            return before
        for elements in (6, 1, 2):
            exchange.sum([torch.ones(elements)])
        return 2

    assert [result for result, _ in outcomes(3, floats(6, 1, 2), compute)] == [2, 2, 2]


def test_in_a_first_call_a_word_tells_all_ranks() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        exchange = exchange_of(ranks, None)
        if ranks.rank == 2:
            ranks.words([2])  # it ends the call
            exchange.leave(CPU)
            return ranks.sums
        with pytest.raises(CallAbandoned):
            exchange.sum([torch.ones(3)])
        exchange.leave(CPU)
        return exchange.is_known_to_all, ranks.sums

    assert on_ranks(3, compute) == [(True, []), (True, []), []]


def test_sums_of_the_backward_are_not_counted() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        exchange = exchange_of(ranks, floats(3))
        value = torch.full((3,), ranks.rank + 1.0, requires_grad=True)
        total = exchange.join(totals, value)
        exchange.end_forward()
        (total * (ranks.rank + 1)).sum().backward()
        assert value.grad is not None
        return value.grad.tolist(), exchange.sums, ranks.sums

    assert on_ranks(3, compute) == [([6.0] * 3, [(3, torch.float32)], [(3,), (3,)])] * 3
