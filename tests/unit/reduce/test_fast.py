"""The `fast` reduction, on ranks that are threads."""

from typing import Any

import torch

from helpers.thread_ranks import ThreadRanks, on_ranks
from samestep.reduce.fast import FastReduction


def test_sums_over_ranks() -> None:
    def compute(ranks: ThreadRanks) -> Any:
        reduction = FastReduction(ranks)
        part = torch.full((3,), ranks.rank + 1.0)
        work = reduction.start(reduction.merge({(ranks.rank, ranks.rank + 1): part.clone()}))
        return reduction.own, reduction.sum([part]).tolist(), reduction.wait(work).tolist()

    expected = [(range(rank, rank + 1), [6.0] * 3, [6.0] * 3) for rank in range(3)]
    assert on_ranks(3, compute) == expected
