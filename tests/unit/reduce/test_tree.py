"""Tree of microbatches: the same pairs are added for any number of ranks."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.microbatches import Shares, owned_microbatches, rank_count
from samestep.reduce.tree import MicrobatchTree, Node

Sum = Any  # a microbatch's number, or a pair of sums


def add(left: Sum, right: Sum) -> Sum:
    """Return a sum as an expression, independent of the order of its two operands: addition commutes."""
    return tuple(sorted((left, right), key=repr))


@st.composite
def trees(draw: st.DrawFn) -> MicrobatchTree:
    return MicrobatchTree(draw(st.integers(1, 40)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MicrobatchTree, Shares]:
    """Return a tree, and equal or unequal shares of at most as many ranks as microbatches."""
    tree = draw(trees())
    size = draw(st.integers(1, tree.microbatches))
    unequal = st.lists(st.integers(1, 5), min_size=size, max_size=size).map(tuple)
    return tree, draw(st.one_of(st.just(size), unequal))


def leaves(microbatches: Iterable[int]) -> dict[Node, Sum]:
    return {(microbatch, microbatch + 1): microbatch for microbatch in microbatches}


def reference(tree: MicrobatchTree) -> Sum:
    return tree.sum(leaves(range(tree.microbatches)), add)


def test_the_tree_over_eight_microbatches() -> None:
    assert reference(MicrobatchTree(8)) == add(add(add(0, 1), add(2, 3)), add(add(4, 5), add(6, 7)))


def test_the_tree_over_five_microbatches() -> None:
    assert reference(MicrobatchTree(5)) == add(add(0, 1), add(2, add(3, 4)))


@given(worlds())
def test_covers_partition_the_microbatches(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    covered = []
    for rank in range(rank_count(shares)):
        owned = owned_microbatches(tree.microbatches, shares, rank)
        for lo, hi in tree.cover(rank, shares):
            assert owned.start <= lo < hi <= owned.stop
            covered += range(lo, hi)
    assert covered == list(range(tree.microbatches))


@given(worlds())
def test_the_sum_does_not_depend_on_the_ranks(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    sums: dict[Node, Sum] = {}
    for rank in range(rank_count(shares)):
        owned = leaves(owned_microbatches(tree.microbatches, shares, rank))
        for node in tree.cover(rank, shares):
            merged = tree.merge(node, owned, add)
            assert list(merged) == [node]
            sums |= merged
    assert tree.sum(sums, add) == reference(tree)


@given(worlds())
def test_early_addition_gives_the_same_sum(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    sums: dict[Node, Sum] = {}
    for rank in range(rank_count(shares)):
        sums |= add_early(tree, rank, shares, lambda sums: None)
    assert tree.sum(sums, add) == reference(tree)


@given(worlds())
def test_early_addition_stores_one_sum_per_level(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    levels = tree.microbatches.bit_length() + 1
    for rank in range(rank_count(shares)):
        cover = len(tree.cover(rank, shares))
        counts: list[int] = []
        add_early(tree, rank, shares, lambda sums, counts=counts: counts.append(len(sums)))
        assert max(counts, default=0) <= cover + levels


def add_early(
    tree: MicrobatchTree, rank: int, shares: Shares, inspect: Callable[[dict[Node, Sum]], None]
) -> dict[Node, Sum]:
    """Return the sums of a rank that adds each microbatch to available sums at once."""
    sums: dict[Node, Sum] = {}
    for leaf, value in leaves(owned_microbatches(tree.microbatches, shares, rank)).items():
        sums[leaf] = value
        sums = {node: total for top in tree.cover(rank, shares) for node, total in tree.merge(top, sums, add).items()}
        inspect(sums)
    return sums


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
def test_the_left_operand_is_the_left_half(microbatches: int) -> None:
    """The in-place addition into the right-hand operand relies on this order."""
    tree = MicrobatchTree(microbatches)
    text = {(microbatch, microbatch + 1): str(microbatch) for microbatch in range(microbatches)}
    total = tree.sum(text, lambda left, right: f"{left},{right}")
    assert total == ",".join(str(microbatch) for microbatch in range(microbatches))


def test_merge_keeps_no_reference_to_its_values() -> None:
    class Value:
        """An object that a weak reference can follow."""

    tree = MicrobatchTree(8)
    value = Value()
    followed = weakref.ref(value)
    gc.disable()
    try:
        tree.merge((0, 8), {(0, 1): value}, lambda left, right: right)
        del value
        assert followed() is None
    finally:
        gc.enable()
