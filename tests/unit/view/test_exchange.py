"""Sums inside of divided calls, and ranks that leave them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.reduce.fast import FastReduction
from samestep.view.exchange import CallAbandoned, CallExchange

CPU = torch.device("cpu")


def exchange_of(ranks: ThreadRanks, sizes: tuple[int, ...] | None) -> CallExchange:
    def all_are_here() -> bool:
        return all(word == [1] for word in ranks.words([1]))

    return CallExchange(FastReduction(ranks), sizes, all_are_here)


def outcomes(
    size: int, sizes: tuple[int, ...] | None, compute: Callable[[int, CallExchange], Any]
) -> list[tuple[Any, CallExchange]]:
    """Return for each rank the result of `compute`, or the kind of its exception, and the exchange."""

    def run(ranks: ThreadRanks) -> tuple[Any, CallExchange]:
        exchange = exchange_of(ranks, sizes)
        try:
            return compute(ranks.rank, exchange), exchange
        except CallAbandoned:
            exchange.leave(CPU)
            return "abandoned", exchange
        except ZeroDivisionError:
            exchange.leave(CPU)
            return "failed", exchange

    return on_ranks(size, run)


def two_sums(rank: int, exchange: CallExchange) -> Any:
    first = exchange.total(torch.full((2, 3), rank + 0.5, dtype=torch.float64))
    return float(exchange.total(first.sum()))


@pytest.mark.parametrize("sizes", [None, (6, 1)], ids=["first call", "later call"])
@pytest.mark.parametrize("size", [3, 4])
def test_sums_of_all_ranks(size: int, sizes: tuple[int, ...] | None) -> None:
    total = sum(rank + 0.5 for rank in range(size)) * 6 * size
    for result, exchange in outcomes(size, sizes, two_sums):
        assert result == total
        assert exchange.sizes == [6, 1]
        assert not exchange.is_known_to_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_keep_dtype_and_shape(dtype: torch.dtype) -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        value = exchange.sum([torch.ones(2, 2, dtype=dtype)])
        return value.dtype == dtype and value.tolist() == [[3, 3], [3, 3]]

    assert [result for result, _ in outcomes(3, (4,), compute)] == [True] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1])
def test_a_rank_that_fails_takes_the_others_with_it(failing: int, after: int) -> None:
    """Without a hang, before the first sum or between the sums of a known kind."""

    def compute(rank: int, exchange: CallExchange) -> Any:
        for number in range(2):
            if rank == failing and number == after:
                raise ZeroDivisionError
            exchange.sum([torch.ones(6 if number == 0 else 1)])

    found = [result for result, _ in outcomes(3, (6, 1), compute)]
    assert found == ["failed" if rank == failing else "abandoned" for rank in range(3)]


def test_two_ranks_may_fail_at_once() -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        if rank != 1:
            raise ZeroDivisionError
        exchange.sum([torch.ones(5)])

    assert [result for result, _ in outcomes(3, (5, 5), compute)] == ["failed", "abandoned", "failed"]


def test_a_failure_after_the_last_sum_sends_nothing() -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        exchange.sum([torch.ones(6)])
        if rank == 0:
            raise ZeroDivisionError
        return "done"

    assert [result for result, _ in outcomes(3, (6,), compute)] == ["failed", "done", "done"]


@pytest.mark.parametrize("elements", [[5], [6, 2], [6, 1, 1]], ids=["size", "second size", "one more"])
def test_sums_that_the_kind_does_not_have_abandon_the_call_on_all_ranks(elements: list[int]) -> None:
    def compute(rank: int, exchange: CallExchange) -> Any:
        for number in elements if rank == 1 else [6, 1]:
            exchange.sum([torch.ones(number)])
        return "done"

    found = [result for result, _ in outcomes(3, (6, 1), compute)]
    assert found[1] == "abandoned"
    # After the last sum of the kind, the word at the end of the call tells the others.
    expected = "done" if len(elements) == 3 else "abandoned"
    assert found[0] == found[2] == expected


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
        exchange = exchange_of(ranks, (3,))
        value = torch.full((3,), ranks.rank + 1.0, requires_grad=True)
        total = exchange.total(value)
        exchange.end_forward()
        (total * (ranks.rank + 1)).sum().backward()
        assert value.grad is not None
        return value.grad.tolist(), exchange.sizes, ranks.sums

    assert on_ranks(3, compute) == [([6.0] * 3, [3], [(4,), (3,)])] * 3
