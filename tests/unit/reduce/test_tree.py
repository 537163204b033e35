"""Tree of microbatches: the same pairs are added for any number of ranks."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.microbatches import Shares, microbatch_bounds, owned_microbatches, rank_count
from samestep.reduce.tree import MicrobatchTree, Node

Sum = Any  # a microbatch's number, or a pair of sums


def add(left: Sum, right: Sum) -> Sum:
    """Return a sum as an expression, independent of the order of its two operands: addition commutes."""
    return tuple(sorted((left, right), key=repr))


@st.composite
def trees(draw: st.DrawFn) -> MicrobatchTree:
    microbatches = draw(st.integers(1, 40))
    return MicrobatchTree(microbatches, draw(st.integers(1, 3 * microbatches)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MicrobatchTree, Shares]:
    """Return a tree, and equal or unequal shares of at most as many ranks as microbatches."""
    tree = draw(trees())
    size = draw(st.integers(1, tree.microbatches))
    unequal = st.lists(st.integers(1, 5), min_size=size, max_size=size).map(tuple)
    return tree, draw(st.one_of(st.just(size), unequal))


def present(tree: MicrobatchTree) -> list[int]:
    bounds = microbatch_bounds(tree.samples, tree.microbatches)
    return [microbatch for microbatch, (start, stop) in enumerate(bounds) if start < stop]


def leaves(tree: MicrobatchTree, microbatches: Any) -> dict[Node, Sum]:
    filled = set(present(tree))
    return {(microbatch, microbatch + 1): microbatch for microbatch in microbatches if microbatch in filled}


def reference(tree: MicrobatchTree) -> Sum:
    return tree.sum(leaves(tree, range(tree.microbatches)), add)


def test_the_tree_over_eight_microbatches() -> None:
    assert reference(MicrobatchTree(8, 8)) == add(add(add(0, 1), add(2, 3)), add(add(4, 5), add(6, 7)))


def test_the_tree_over_five_microbatches() -> None:
    assert reference(MicrobatchTree(5, 5)) == add(add(0, 1), add(2, add(3, 4)))


def test_microbatches_without_samples_are_omitted() -> None:
    assert present(MicrobatchTree(8, 3)) == [2, 5, 7]
    assert reference(MicrobatchTree(8, 3)) == add(2, add(5, 7))


@given(trees())
def test_a_node_has_samples_if_a_microbatch_below_has(tree: MicrobatchTree) -> None:
    filled = present(tree)
    for lo in range(tree.microbatches):
        for hi in range(lo + 1, tree.microbatches + 1):
            assert tree.has_samples((lo, hi)) == any(lo <= microbatch < hi for microbatch in filled)


@given(worlds())
def test_covers_partition_the_microbatches_with_samples(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    covered = []
    for rank in range(rank_count(shares)):
        owned = owned_microbatches(tree.microbatches, shares, rank)
        for lo, hi in tree.cover(rank, shares):
            assert owned.start <= lo < hi <= owned.stop
            covered += [microbatch for microbatch in range(lo, hi) if microbatch in present(tree)]
    assert covered == present(tree)


@given(worlds())
def test_the_sum_does_not_depend_on_the_ranks(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    sums: dict[Node, Sum] = {}
    for rank in range(rank_count(shares)):
        owned = leaves(tree, owned_microbatches(tree.microbatches, shares, rank))
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
    for leaf, value in leaves(tree, owned_microbatches(tree.microbatches, shares, rank)).items():
        sums[leaf] = value
        sums = {node: total for top in tree.cover(rank, shares) for node, total in tree.merge(top, sums, add).items()}
        inspect(sums)
    return sums


@given(worlds())
def test_pairs_of_ranks_compute_the_same_sum(world: tuple[MicrobatchTree, Shares]) -> None:
    tree, shares = world
    if not tree.pairs_up(shares):
        return
    sums = []
    for rank in range(rank_count(shares)):
        (node,) = tree.cover(rank, shares)
        sums.append(tree.merge(node, leaves(tree, owned_microbatches(tree.microbatches, shares, rank)), add)[node])
    distance = 1
    while distance < len(sums):
        sums = [add(sums[rank], sums[rank ^ distance]) for rank in range(len(sums))]
        distance *= 2
    assert set(map(repr, sums)) == {repr(reference(tree))}


@pytest.mark.parametrize(
    ("tree", "shares", "pairs"),
    [
        (MicrobatchTree(8, 64), 1, True),
        (MicrobatchTree(8, 64), 2, True),
        (MicrobatchTree(8, 64), 4, True),
        (MicrobatchTree(8, 64), 8, True),
        (MicrobatchTree(8, 64), 3, False),
        (MicrobatchTree(8, 64), 6, False),
        (MicrobatchTree(8, 1), 2, False),
        (MicrobatchTree(7, 64), 2, True),
        (MicrobatchTree(6, 64), 4, True),
        (MicrobatchTree(8, 3), 2, True),
        (MicrobatchTree(8, 3), 4, False),
        (MicrobatchTree(8, 64), (3, 3), True),
        (MicrobatchTree(8, 64), (5, 3), False),
    ],
)
def test_ranks_pair_up_if_each_owns_one_subtree(tree: MicrobatchTree, shares: Shares, pairs: bool) -> None:
    assert tree.pairs_up(shares) == pairs


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 13])
def test_the_left_operand_is_the_left_half(microbatches: int) -> None:
    """The in-place addition into the right-hand operand relies on this order."""
    tree = MicrobatchTree(microbatches, microbatches)
    text = {(microbatch, microbatch + 1): str(microbatch) for microbatch in range(microbatches)}
    total = tree.sum(text, lambda left, right: f"{left},{right}")
    assert total == ",".join(str(microbatch) for microbatch in range(microbatches))


def test_merge_keeps_no_reference_to_its_values() -> None:
    class Value:
        """An object that a weak reference can follow."""

    tree = MicrobatchTree(8, 8)
    value = Value()
    followed = weakref.ref(value)
    gc.disable()
    try:
        tree.merge((0, 8), {(0, 1): value}, lambda left, right: right)
        del value
        assert followed() is None
    finally:
        gc.enable()
