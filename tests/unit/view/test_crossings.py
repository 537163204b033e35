"""Crossings and their derivatives, on ranks that are threads."""

from typing import Any

import pytest
import torch

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.reduce.fast import FastReduction
from samestep.view.crossings import RowBounds, cut, enter, gather, leave, totals
from samestep.view.ranks import Slices

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


@SIZES
def test_the_gradient_of_gathered_rows_is_cut(size: int) -> None:
    weights = leaf(6, 2, seed=1).detach()

    def compute(ranks: ThreadRanks) -> Any:
        rows = rows_of(ranks)
        own = rows.own(leaf(6, 2))[0].detach().requires_grad_()
        whole = gather([own], rows)
        assert torch.equal(whole, leaf(6, 2))
        (whole * weights).sum().backward()
        return torch.equal(own.grad, rows.own(weights)[0])

    assert on_ranks(size, compute) == [True] * size


@SIZES
def test_the_gradient_of_what_enters_is_the_sum_of_the_parts(size: int) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        whole = leaf(3)
        inside = enter(whole, FastReduction(ranks), 1)[0]
        assert torch.equal(inside, whole)
        (inside * (ranks.rank + 1)).sum().backward()
        assert whole.grad is not None
        return whole.grad.tolist()

    assert on_ranks(size, compute) == [[size * (size + 1) / 2] * 3] * size


@SIZES
def test_the_gradient_of_what_leaves_is_that_of_the_whole(size: int) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        part = torch.full((2,), float(ranks.rank + 1), requires_grad=True)
        whole = leave([part], FastReduction(ranks))
        (whole * torch.tensor([3.0, 5.0])).sum().backward()
        assert part.grad is not None
        return whole.tolist(), part.grad.tolist()

    assert on_ranks(size, compute) == [([size * (size + 1) / 2] * 2, [3.0, 5.0])] * size


@SIZES
def test_the_gradient_of_a_total_is_the_total_of_the_gradients(size: int) -> None:
    def compute(ranks: ThreadRanks) -> Any:
        part = torch.full((2,), float(ranks.rank + 1), requires_grad=True)
        (totals(FastReduction(ranks), [part])[0] * (ranks.rank + 1)).sum().backward()
        assert part.grad is not None
        return part.grad.tolist()

    assert on_ranks(size, compute) == [[size * (size + 1) / 2] * 2] * size


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
