"""Memory of sums."""

import weakref
from collections.abc import Callable

import pytest
import torch

from samestep.distributed.world import World
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.ddp import DdpStrategy
from samestep.strategies.reduction import ExactReduction


class OtherStream:
    """A stream that may compute later."""

    def submit(self, communicate: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
        future = torch.futures.Future[torch.Tensor]()
        future.set_result(communicate())
        return future


def test_summed_vectors_keep_their_memory_until_the_sum_is_read() -> None:
    """Vectors are memory of the current stream, and their sum is computed in another one."""
    world, strategy = World(0, 1, torch.device("cpu")), object.__new__(DdpStrategy)
    strategy._comm_stream, strategy._reduction = OtherStream(), ExactReduction(world, [])  # type: ignore[assignment]
    vectors = {(number, number + 1): torch.ones(3, dtype=torch.float64) for number in range(4)}
    references = [weakref.ref(vector) for vector in vectors.values()]
    total = strategy.sum_vectors(MicrobatchTree(4, 8), vectors, 3)
    del vectors
    assert None not in [reference() for reference in references]
    assert total().tolist() == [4.0] * 3
    del total
    assert [reference() for reference in references] == [None] * 4


def test_ranks_of_an_accelerator_connect_before_their_first_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for all ranks of a group in its first operation; a rank without samples may have no message."""
    groups: list[int] = []
    monkeypatch.setattr("samestep.distributed.devices.ACCELERATOR", "cpu")
    monkeypatch.setattr(World, "all_reduce", lambda self, tensor: groups.append(self.size))
    for size in (1, 2):
        ExactReduction(World(0, size, torch.device("cpu")), [])
    assert groups == [2]
