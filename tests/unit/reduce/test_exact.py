"""Sums in the order of the tree of microbatches: the same pairs are added for any number of ranks."""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samestep
from helpers.forked_ranks import Job, run_jobs
from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.reduce.exact import ExactReduction, MicrobatchTree
from samestep.reduce.fast import Node

# Sums of these depend on the order.
NUMBERS = [1.0, 1e16, -1e16, 1.0, 3.0, -1e16, 1e16, 1.0]


def reduction(microbatches: int) -> ExactReduction:
    return ExactReduction(World(0, 1, torch.device("cpu")), microbatches)


def parts(numbers: list[float]) -> list[torch.Tensor]:
    return [torch.full((2, 3), number, dtype=torch.float64) for number in numbers]


def in_tree(numbers: list[float]) -> float:
    if len(numbers) == 1:
        return numbers[0]
    middle = len(numbers) // 2
    return in_tree(numbers[:middle]) + in_tree(numbers[middle:])


def test_the_order_is_that_of_the_tree() -> None:
    for count in range(1, 9):
        numbers = NUMBERS[:count]
        assert reduction(count).sum(parts(numbers)).tolist() == [[in_tree(numbers)] * 3] * 2
    assert in_tree(NUMBERS) != sum(NUMBERS)


def test_subtrees_are_merged_as_soon_as_they_are_there() -> None:
    """From the last microbatch to the first, as in a backward; at most one sum for each level is kept."""
    exact = reduction(8)
    sums = {}
    kept = []
    for number in reversed(range(8)):
        leaf = torch.full((4,), NUMBERS[number], dtype=torch.float64)
        sums = exact.merge({(number, number + 1): leaf, **sums})
        kept.append(len(sums))
    assert kept == [1, 1, 2, 1, 2, 2, 3, 1]
    assert exact.wait(exact.start(sums)).tolist() == [in_tree(NUMBERS)] * 4


Sum = Any  # a microbatch's number, or a pair of sums


def add(left: Sum, right: Sum) -> Sum:
    """Return a sum as an expression, independent of the order of its two operands: addition commutes."""
    return tuple(sorted((left, right), key=repr))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[MicrobatchTree, int]:
    """Return a tree, and a number of at most as many ranks as microbatches."""
    tree = MicrobatchTree(draw(st.integers(1, 40)))
    return tree, draw(st.integers(1, tree.microbatches))


def leaves(microbatches: Iterable[int]) -> dict[Node, Sum]:
    return {(microbatch, microbatch + 1): microbatch for microbatch in microbatches}


def reference(tree: MicrobatchTree) -> Sum:
    return tree.sum(leaves(range(tree.microbatches)), add)


@given(worlds())
def test_covers_partition_the_microbatches(world: tuple[MicrobatchTree, int]) -> None:
    tree, ranks = world
    covered = []
    for rank in range(ranks):
        owned = owned_microbatches(tree.microbatches, ranks, rank)
        for lo, hi in tree.cover(rank, ranks):
            assert owned.start <= lo < hi <= owned.stop
            covered += range(lo, hi)
    assert covered == list(range(tree.microbatches))


@given(worlds())
def test_the_sum_does_not_depend_on_the_ranks(world: tuple[MicrobatchTree, int]) -> None:
    tree, ranks = world
    sums: dict[Node, Sum] = {}
    for rank in range(ranks):
        owned = leaves(owned_microbatches(tree.microbatches, ranks, rank))
        for node in tree.cover(rank, ranks):
            merged = tree.merge(node, owned, add)
            assert list(merged) == [node]
            sums |= merged
    assert tree.sum(sums, add) == reference(tree)


@given(worlds())
def test_early_addition_gives_the_same_sum_and_stores_one_sum_per_level(world: tuple[MicrobatchTree, int]) -> None:
    tree, ranks = world
    levels = tree.microbatches.bit_length() + 1
    sums: dict[Node, Sum] = {}
    for rank in range(ranks):
        counts: list[int] = []
        sums |= add_early(tree, rank, ranks, lambda own, counts=counts: counts.append(len(own)))
        assert max(counts, default=0) <= len(tree.cover(rank, ranks)) + levels
    assert tree.sum(sums, add) == reference(tree)


def add_early(
    tree: MicrobatchTree, rank: int, ranks: int, inspect: Callable[[dict[Node, Sum]], None]
) -> dict[Node, Sum]:
    """Return the sums of a rank that adds each microbatch to available sums at once."""
    sums: dict[Node, Sum] = {}
    for leaf, value in leaves(owned_microbatches(tree.microbatches, ranks, rank)).items():
        sums[leaf] = value
        sums = {node: total for top in tree.cover(rank, ranks) for node, total in tree.merge(top, sums, add).items()}
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


CASES = (
    (1, torch.float32),
    (7, torch.complex64),
    (100, torch.bfloat16),
    (16_384, torch.float32),  # as large as a small vector can be
    (16_385, torch.float32),
    (40_001, torch.bfloat16),
    (20_000, torch.complex64),
    (100_003, torch.float64),
)


def values(microbatch: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(1, length + 1, dtype=torch.float64).add_(microbatch).sin_()  # sums depend on the order
    return numbers.to(dtype)


def tensor_in_tree(microbatches: range, length: int, dtype: torch.dtype) -> torch.Tensor:
    if len(microbatches) == 1:
        return values(microbatches.start, length, dtype)
    middle = microbatches.start + len(microbatches) // 2
    left = tensor_in_tree(range(microbatches.start, middle), length, dtype)
    return left + tensor_in_tree(range(middle, microbatches.stop), length, dtype)


def differences(world: World, microbatches: int) -> list[str]:
    """Return the lengths and dtypes for which this rank has other bits than one process, or changes another tensor."""
    found = []
    exact = ExactReduction(world, microbatches)
    own = owned_microbatches(microbatches, world.size, world.rank)
    for length, dtype in CASES:
        own_leaves: dict[Node, torch.Tensor] = {(n, n + 1): values(n, length, dtype) for n in own}
        expected = tensor_in_tree(range(microbatches), length, dtype)
        summed = exact.wait(exact.start(exact.merge(own_leaves)))
        own_parts = [values(n, length, dtype).view(1, -1) for n in own]
        total = exact.sum(own_parts)
        is_same = torch.equal(summed, expected) and torch.equal(total, expected.view(1, -1))
        is_kept = all(torch.equal(part[0], values(n, length, dtype)) for part, n in zip(own_parts, own, strict=True))
        if not (is_same and is_kept):
            found.append(f"{microbatches} microbatches, {length} of {dtype}")
    return found


def compare(microbatches: list[int], *, uses_sockets: bool) -> Any:
    """Return the differences of all ranks."""
    with samestep.init(device="cpu") as world:
        if not uses_sockets:
            world.__dict__["sockets"] = None  # as between two machines: the backend sends
        found = [text for number in microbatches for text in differences(world, number)]
        found += [text for rank in samestep.all_gather(found) for text in rank]
    return found


def jobs(ranks: int) -> list[Job]:
    microbatches = sorted({ranks, 8, 13})
    return [
        Job("compare", ranks, {"microbatches": microbatches, "uses_sockets": uses_sockets})
        for uses_sockets in (True, False)
    ]


def test_four_ranks_have_the_bits_of_one_process() -> None:
    assert run_jobs("unit.reduce.test_exact", *jobs(4)) == [[], []]


@pytest.mark.slow
def test_any_number_of_ranks_has_the_bits_of_one_process() -> None:
    others = [job for ranks in (1, 2, 3, 5, 6, 7, 8) for job in jobs(ranks)]
    assert run_jobs("unit.reduce.test_exact", *others) == [[]] * len(others)
