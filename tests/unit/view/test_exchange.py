"""Sums inside of divided calls, and ranks that leave them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.reduce.fast import FastReduction
from samestep.view.exchange import CallAbandoned, CallExchange, Sum

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
    first = exchange.total(torch.full((2, 3), rank + 0.5))
    return float(exchange.total(first.sum()))


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
        total = exchange.total(value)
        exchange.end_forward()
        (total * (ranks.rank + 1)).sum().backward()
        assert value.grad is not None
        return value.grad.tolist(), exchange.sums, ranks.sums

    assert on_ranks(3, compute) == [([6.0] * 3, [(3, torch.float32)], [(3,), (3,)])] * 3
