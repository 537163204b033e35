"""Every reduction gives the sum over shards to every rank; `exact` gives the same bits for any number of ranks."""

import hashlib
from typing import Any

import numpy
import pytest
import torch

import ranks_reductions
from ranks_reductions import DTYPES, LONG, NAMES, TREES, as_bytes, filled, gradients_of, vector_of
from samestep import launch
from samestep.parallel.tree import ShardTree

RANKS = [1, 2, 3, 4, 5, 8]
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(scope="module")
def sums() -> dict[int, Any]:
    return {ranks: launch(ranks_reductions.sums, processes=ranks) for ranks in RANKS}


def cases(sums: dict[int, Any], what: str, name: str, dtype: str) -> set[tuple[ShardTree, bytes]]:
    """Every different sum that any rank of any world came to in any way, with the batch it is of."""
    return {
        (tree, total)
        for ranks in RANKS
        for found in sums[ranks]
        for (reduction, called, tree, _), total in found[what].items()
        if (reduction, called) == (name, dtype)
    }


def in_tree_order(tree: ShardTree, values: dict[int, list[torch.Tensor]]) -> bytes:
    """The sum as the tree says, one addition after another."""
    leaves = {(shard, shard + 1): tensors for shard, tensors in values.items()}
    total = tree.fold((0, tree.shards), leaves, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])
    assert total is not None
    return as_bytes(total)


def plain_sum(values: list[list[torch.Tensor]]) -> list[float]:
    columns = zip(*[[float(x) for tensor in tensors for x in tensor.flatten()] for tensors in values], strict=True)
    return [float(numpy.sum(numpy.array(column, dtype=numpy.longdouble))) for column in columns]


def numbers(found: bytes, dtype: str) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(found, dtype=dtype).astype(numpy.float64)


def error(found: numpy.ndarray[Any, Any], values: list[list[torch.Tensor]]) -> float:
    """The largest error, relative to the largest summand of each element."""
    expected = numpy.array(plain_sum(values))
    largest = numpy.max([[abs(float(x)) for t in tensors for x in t.flatten()] for tensors in values], axis=0)
    return float(numpy.max(numpy.abs(found - expected) / largest))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gets_the_sum_over_all_shards(sums: dict[int, Any], name: str, dtype: str) -> None:
    found = cases(sums, "gradients", name, dtype)
    assert {tree for tree, _ in found} == set(TREES)
    for tree, total in found:
        values = [gradients_of(shard, DTYPES[dtype]) for shard in filled(tree)]
        assert error(numbers(total, dtype), values) < TOLERANCE[dtype], tree


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gets_the_sum_of_all_vectors(sums: dict[int, Any], name: str) -> None:
    for tree, total in cases(sums, "vectors", name, "float64"):
        values = [[vector_of(shard)] for shard in filled(tree)]
        assert error(numbers(total, "float64"), values) < TOLERANCE["float64"], tree


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_adds_in_the_order_of_the_tree(sums: dict[int, Any], dtype: str) -> None:
    for tree, total in cases(sums, "gradients", "exact", dtype):
        expected = in_tree_order(tree, {shard: gradients_of(shard, DTYPES[dtype]) for shard in filled(tree)})
        assert total == expected, tree


def test_exact_adds_vectors_in_the_order_of_the_tree(sums: dict[int, Any]) -> None:
    for tree, total in cases(sums, "vectors", "exact", "float64"):
        assert total == in_tree_order(tree, {shard: [vector_of(shard)] for shard in filled(tree)}), tree


def test_exact_adds_long_vectors_in_the_order_of_the_tree(sums: dict[int, Any]) -> None:
    expected = {
        tree: in_tree_order(tree, {shard: [vector_of(shard, LONG)] for shard in filled(tree)}) for tree in TREES[:3]
    }
    found = cases(sums, "long", "exact", "float64")
    assert found == {(tree, hashlib.sha256(total).digest()) for tree, total in expected.items()}


def test_all_ranks_of_a_world_have_the_same_bits(sums: dict[int, Any]) -> None:
    for ranks in RANKS:
        assert len(sums[ranks]) == ranks
        assert all(found == sums[ranks][0] for found in sums[ranks])


def test_every_way_to_a_sum_was_taken(sums: dict[int, Any]) -> None:
    def taken(ranks: int) -> set[str]:
        return {way for *_, way in sums[ranks][0]["gradients"]}

    assert taken(1) == {"local", "buckets", "kept"}
    assert all(taken(ranks) == {"buckets", "kept"} for ranks in RANKS[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_these_gradients_show_the_order_of_summation(dtype: str) -> None:
    """Else the tests above could not fail."""
    values = {shard: gradients_of(shard, DTYPES[dtype]) for shard in range(8)}
    one_by_one = [torch.zeros_like(tensor) for tensor in values[0]]
    for tensors in values.values():
        one_by_one = [a + b for a, b in zip(one_by_one, tensors, strict=True)]
    assert as_bytes(one_by_one) != in_tree_order(ShardTree(8, 8), values)
