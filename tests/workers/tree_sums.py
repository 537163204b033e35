"""Sums in tree order over real ranks, compared with sums of one process."""

from typing import Any

import torch

import samestep
from samestep.distributed.world import World
from samestep.microbatches import owned_microbatches
from samestep.reduce.exact import ExactReduction
from samestep.reduce.tree import Node

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


def in_tree(microbatches: range, length: int, dtype: torch.dtype) -> torch.Tensor:
    if len(microbatches) == 1:
        return values(microbatches.start, length, dtype)
    middle = microbatches.start + len(microbatches) // 2
    left = in_tree(range(microbatches.start, middle), length, dtype)
    return left + in_tree(range(middle, microbatches.stop), length, dtype)


def differences(world: World, microbatches: int) -> list[str]:
    """Return the lengths and dtypes for which this rank has other bits than one process, or changes another tensor."""
    found = []
    reduction = ExactReduction(world, microbatches)
    own = owned_microbatches(microbatches, world.shares, world.rank)
    for length, dtype in CASES:
        leaves: dict[Node, torch.Tensor] = {(n, n + 1): values(n, length, dtype) for n in own}
        expected = in_tree(range(microbatches), length, dtype)
        summed = reduction.wait(reduction.start(reduction.merge(leaves)))
        parts = [values(n, length, dtype).view(1, -1) for n in own]
        total = reduction.sum(parts)
        is_same = torch.equal(summed, expected) and torch.equal(total, expected.view(1, -1))
        is_kept = all(torch.equal(part[0], values(n, length, dtype)) for part, n in zip(parts, own, strict=True))
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
