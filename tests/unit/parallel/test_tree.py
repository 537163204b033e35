"""Whatever the number of ranks, the same pairs are added."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.parallel.tree import Node, ShardTree, halves, merged
from samestep.sharding import owned_shards, shard_bounds

Sum = Any  # a shard's number, or a pair of sums


def add(left: Sum, right: Sum) -> Sum:
    """A sum as an expression in which the order of the two operands, which cannot matter, does not count."""
    return tuple(sorted((left, right), key=repr))


@st.composite
def trees(draw: st.DrawFn) -> ShardTree:
    shards = draw(st.integers(1, 40))
    return ShardTree(shards, draw(st.integers(1, 3 * shards)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ShardTree, int]:
    tree = draw(trees())
    return tree, draw(st.integers(1, tree.shards))


def present(tree: ShardTree) -> list[int]:
    bounds = shard_bounds(tree.samples, tree.shards)
    return [shard for shard, (start, stop) in enumerate(bounds) if start < stop]


def leaves(tree: ShardTree, shards: Any) -> dict[Node, Sum]:
    there = set(present(tree))
    return {(shard, shard + 1): shard for shard in shards if shard in there}


def alone(tree: ShardTree) -> Sum:
    return tree.fold((0, tree.shards), leaves(tree, range(tree.shards)), add)


def test_the_tree_over_eight_shards() -> None:
    assert alone(ShardTree(8, 8)) == add(add(add(0, 1), add(2, 3)), add(add(4, 5), add(6, 7)))


def test_the_tree_over_five_shards() -> None:
    assert alone(ShardTree(5, 5)) == add(add(0, 1), add(2, add(3, 4)))


def test_shards_without_samples_are_left_out() -> None:
    assert present(ShardTree(8, 3)) == [2, 5, 7]
    assert alone(ShardTree(8, 3)) == add(2, add(5, 7))


@given(trees())
def test_a_node_has_samples_where_a_shard_below_it_has(tree: ShardTree) -> None:
    there = present(tree)
    for lo in range(tree.shards):
        for hi in range(lo + 1, tree.shards + 1):
            assert tree.has_samples((lo, hi)) == any(lo <= shard < hi for shard in there)


@given(worlds())
def test_covers_share_out_the_shards_that_have_samples(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    covered = []
    for rank in range(size):
        owned = owned_shards(tree.shards, size, rank)
        for lo, hi in tree.cover(rank, size):
            assert owned.start <= lo < hi <= owned.stop
            covered += [shard for shard in range(lo, hi) if shard in present(tree)]
    assert covered == present(tree)


@given(worlds())
def test_covers_are_the_largest_subtrees(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    parents = {half: node for node in nodes_below((0, tree.shards)) if node[1] - node[0] > 1 for half in halves(node)}
    for rank in range(size):
        owned = owned_shards(tree.shards, size, rank)
        for node in tree.cover(rank, size):
            lo, hi = parents.get(node, (-1, tree.shards + 1))
            assert not owned.start <= lo < hi <= owned.stop
            assert tree.has_samples(node)


def nodes_below(node: Node) -> list[Node]:
    if node[1] - node[0] == 1:
        return [node]
    return [node, *(below for half in halves(node) for below in nodes_below(half))]


@given(worlds())
def test_any_number_of_ranks_takes_the_same_sum(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    met: dict[Node, Sum] = {}
    for rank in range(size):
        owned = leaves(tree, owned_shards(tree.shards, size, rank))
        met |= {node: tree.fold(node, owned, add) for node in tree.cover(rank, size)}
    assert tree.fold((0, tree.shards), met, add) == alone(tree)


@given(worlds())
def test_adding_up_early_takes_the_same_sum(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    met: dict[Node, Sum] = {}
    for rank in range(size):
        met |= added_up_early(tree, rank, size, lambda kept: None)
    assert tree.fold((0, tree.shards), met, add) == alone(tree)


@given(worlds())
def test_adding_up_early_keeps_one_sum_a_level(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    levels = tree.shards.bit_length() + 1
    for rank in range(size):
        cover = len(tree.cover(rank, size))
        kept_counts: list[int] = []
        added_up_early(tree, rank, size, lambda kept, counts=kept_counts: counts.append(len(kept)))
        assert max(kept_counts, default=0) <= cover + levels


def added_up_early(tree: ShardTree, rank: int, size: int, look: Callable[[dict[Node, Sum]], None]) -> dict[Node, Sum]:
    """The sums of a rank that adds each shard to what it can as soon as the shard is there."""
    kept: dict[Node, Sum] = {}
    for leaf, value in leaves(tree, owned_shards(tree.shards, size, rank)).items():
        kept[leaf] = value
        kept = {node: total for top in tree.cover(rank, size) for node, total in merged(tree, top, kept, add).items()}
        look(kept)
    return kept


@given(worlds())
def test_pairs_of_ranks_take_the_same_sum_where_they_pair_up(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    if not tree.pairs_up(size):
        return
    sums = []
    for rank in range(size):
        (node,) = tree.cover(rank, size)
        sums.append(tree.fold(node, leaves(tree, owned_shards(tree.shards, size, rank)), add))
    distance = 1
    while distance < size:
        sums = [add(sums[rank], sums[rank ^ distance]) for rank in range(size)]
        distance *= 2
    assert set(map(repr, sums)) == {repr(alone(tree))}


@pytest.mark.parametrize(
    ("tree", "size", "pairs"),
    [
        (ShardTree(8, 64), 1, True),
        (ShardTree(8, 64), 2, True),
        (ShardTree(8, 64), 4, True),
        (ShardTree(8, 64), 8, True),
        (ShardTree(8, 64), 3, False),
        (ShardTree(8, 64), 6, False),
        (ShardTree(8, 1), 2, False),
        (ShardTree(7, 64), 2, True),
        (ShardTree(6, 64), 4, True),
        (ShardTree(8, 3), 2, True),
        (ShardTree(8, 3), 4, False),
    ],
)
def test_ranks_pair_up_where_each_has_one_subtree_of_its_own(tree: ShardTree, size: int, pairs: bool) -> None:
    assert tree.pairs_up(size) == pairs


@given(worlds())
def test_all_share_a_batch_where_each_rank_has_samples(world: tuple[ShardTree, int]) -> None:
    tree, size = world
    loads = [leaves(tree, owned_shards(tree.shards, size, rank)) for rank in range(size)]
    assert tree.is_shared_by_all(size) == all(loads)


def test_nothing_below_a_node_is_no_sum() -> None:
    assert ShardTree(8, 3).fold((0, 2), {}, add) is None
    assert merged(ShardTree(8, 3), (0, 2), {}, add) == {}


def test_a_known_subtree_is_taken_as_it_is() -> None:
    tree = ShardTree(4, 4)
    assert tree.fold((0, 4), {(0, 2): "low", (2, 4): "high"}, add) == add("low", "high")


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 13])
def test_the_left_operand_is_the_left_half(shards: int) -> None:
    """In-place addition into the right-hand operand keeps the last shard's memory: the order is a promise."""
    tree = ShardTree(shards, shards)
    text = {(shard, shard + 1): str(shard) for shard in range(shards)}
    total = tree.fold((0, shards), text, lambda left, right: f"{left},{right}")
    assert total == ",".join(str(shard) for shard in range(shards))
