"""The `exact` reduction on one rank that owns all microbatches; several ranks: tests/plain_loop/test_exact.py."""

import torch

from samestep.distributed.world import World
from samestep.reduce.exact import ExactReduction

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


def test_parts_keep_their_values() -> None:
    own = parts(NUMBERS)
    reduction(8).sum(own)
    assert [part[0, 0].item() for part in own] == NUMBERS


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
