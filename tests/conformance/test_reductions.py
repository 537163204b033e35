"""Conformance of reductions: the sum over microbatches on every rank, under `exact` with the same bits."""

import hashlib
from typing import Any

import numpy
import pytest
import torch

from samestep import launch
from samestep.reduce.tree import MicrobatchTree
from workers import reductions as ranks_reductions
from workers.reductions import DTYPES, LONG, NAMES, TREES, as_bytes, filled, gradients_of, vector_of

RANKS = [1, 2, 3, 4, 5, 8]
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


@pytest.fixture(scope="module")
def sums() -> dict[int, Any]:
    return {ranks: launch(ranks_reductions.sums, processes=ranks) for ranks in RANKS}


def cases(sums: dict[int, Any], kind: str, name: str, dtype: str) -> set[tuple[MicrobatchTree, bytes]]:
    """Return the distinct sums of all ranks, worlds and methods, with their batches."""
    return {
        (tree, total)
        for ranks in RANKS
        for results in sums[ranks]
        for (reduction, dtype_name, tree, _), total in results[kind].items()
        if (reduction, dtype_name) == (name, dtype)
    }


def in_tree_order(tree: MicrobatchTree, values: dict[int, list[torch.Tensor]]) -> bytes:
    """Return the sum in tree order."""
    leaves = {(microbatch, microbatch + 1): tensors for microbatch, tensors in values.items()}
    return as_bytes(tree.sum(leaves, lambda left, right: [a + b for a, b in zip(left, right, strict=True)]))


def exact_sum(values: list[list[torch.Tensor]]) -> list[float]:
    columns = zip(*[[float(x) for tensor in tensors for x in tensor.flatten()] for tensors in values], strict=True)
    return [float(numpy.sum(numpy.array(column, dtype=numpy.longdouble))) for column in columns]


def numbers(data: bytes, dtype: str) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(data, dtype=dtype).astype(numpy.float64)


def error(result: numpy.ndarray[Any, Any], values: list[list[torch.Tensor]]) -> float:
    """Return the largest error, relative to the largest summand of each element."""
    expected = numpy.array(exact_sum(values))
    largest = numpy.max([[abs(float(x)) for t in tensors for x in t.flatten()] for tensors in values], axis=0)
    return float(numpy.max(numpy.abs(result - expected) / largest))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_the_sum_over_all_microbatches(sums: dict[int, Any], name: str, dtype: str) -> None:
    totals = cases(sums, "gradients", name, dtype)
    assert {tree for tree, _ in totals} == set(TREES)
    for tree, total in totals:
        values = [gradients_of(microbatch, DTYPES[dtype]) for microbatch in filled(tree)]
        assert error(numbers(total, dtype), values) < TOLERANCE[dtype], tree


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_the_sum_of_all_vectors(sums: dict[int, Any], name: str) -> None:
    for tree, total in cases(sums, "vectors", name, "float64"):
        values = [[vector_of(microbatch)] for microbatch in filled(tree)]
        assert error(numbers(total, "float64"), values) < TOLERANCE["float64"], tree


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_adds_in_the_order_of_the_tree(sums: dict[int, Any], dtype: str) -> None:
    for tree, total in cases(sums, "gradients", "exact", dtype):
        expected = in_tree_order(
            tree, {microbatch: gradients_of(microbatch, DTYPES[dtype]) for microbatch in filled(tree)}
        )
        assert total == expected, tree


def test_exact_adds_vectors_in_the_order_of_the_tree(sums: dict[int, Any]) -> None:
    for tree, total in cases(sums, "vectors", "exact", "float64"):
        assert total == in_tree_order(tree, {microbatch: [vector_of(microbatch)] for microbatch in filled(tree)}), tree


def test_exact_adds_long_vectors_in_the_order_of_the_tree(sums: dict[int, Any]) -> None:
    expected = {
        tree: in_tree_order(tree, {microbatch: [vector_of(microbatch, LONG)] for microbatch in filled(tree)})
        for tree in TREES[:3]
    }
    assert cases(sums, "long", "exact", "float64") == {
        (tree, hashlib.sha256(total).digest()) for tree, total in expected.items()
    }


def test_all_ranks_of_a_world_have_the_same_bits(sums: dict[int, Any]) -> None:
    for ranks in RANKS:
        assert len(sums[ranks]) == ranks
        assert all(results == sums[ranks][0] for results in sums[ranks])


def test_every_method_was_used(sums: dict[int, Any]) -> None:
    def used(ranks: int) -> set[str]:
        return {method for *_, method in sums[ranks][0]["gradients"]}

    assert used(1) == {"local", "buckets", "accumulated"}
    assert all(used(ranks) == {"buckets", "accumulated"} for ranks in RANKS[1:])


def test_messages_through_copies_are_part_of_the_comparisons(sums: dict[int, Any]) -> None:
    for kind in ("vectors", "long"):
        assert {method for *_, method in sums[3][0][kind]} == {"vector", "staged"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_summation_changes_the_bits(dtype: str) -> None:
    """Otherwise the tests above could not fail."""
    values = {microbatch: gradients_of(microbatch, DTYPES[dtype]) for microbatch in range(8)}
    one_by_one = [torch.zeros_like(tensor) for tensor in values[0]]
    for tensors in values.values():
        one_by_one = [a + b for a, b in zip(one_by_one, tensors, strict=True)]
    assert as_bytes(one_by_one) != in_tree_order(MicrobatchTree(8, 8), values)
