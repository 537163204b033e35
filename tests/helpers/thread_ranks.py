"""Ranks as threads of one process, with the methods of `samestep.view.messages.Ranks`."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

TIMEOUT = 30


class _Meeting:
    """Exchange of objects between the threads, in the order of the calls of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[list[Any]] = [[] for _ in range(size)]
        self._changed = threading.Condition()

    def give(self, rank: int, value: Any) -> int:
        with self._changed:
            self._given[rank].append(value)
            self._changed.notify_all()
            return len(self._given[rank]) - 1

    def take(self, number: int) -> list[Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: all(len(given) > number for given in self._given), TIMEOUT):
                raise TimeoutError(f"exchange {number}: given {[len(given) for given in self._given]}")
            return [given[number] for given in self._given]


class ThreadRanks:
    """One rank, in a thread.

    Attributes:
        rank: its number.
        size: number of ranks.
        sums: shapes of the sums so far.
        started: sums that did not block: the tensors.
    """

    def __init__(self, rank: int, calls: _Meeting, started: _Meeting) -> None:
        self.rank = rank
        self.size = calls.size
        self.sums: list[tuple[int, ...]] = []
        self.started: list[torch.Tensor] = []
        self._calls = calls
        self._started = started

    def words(self, word: Sequence[int]) -> list[list[int]]:
        return self._calls.take(self._calls.give(self.rank, list(word)))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sums.append(tuple(values.shape))
        parts = self._calls.take(self._calls.give(self.rank, values.detach().clone()))
        assert len({part.shape for part in parts}) == 1
        return torch.stack(parts).sum(0)

    def start_sum(self, values: torch.Tensor) -> Any:
        self.started.append(values)
        return values, self._started.give(self.rank, values.detach().clone())

    def wait(self, work: Any) -> None:
        values, number = work
        parts = self._started.take(number)
        assert len({part.shape for part in parts}) == 1, f"sum {number} of {[part.shape for part in parts]}"
        values.copy_(torch.stack(parts).sum(0))

    def gather_rows(self, own: Sequence[torch.Tensor], bounds: Sequence[tuple[int, int]], factor: int) -> torch.Tensor:
        parts = self._calls.take(self._calls.give(self.rank, torch.cat([part.detach() for part in own])))
        assert [len(part) for part in parts] == [(stop - start) * factor for start, stop in bounds]
        return torch.cat(parts)


def on_ranks(size: int, compute: Callable[[Any], Any]) -> list[Any]:
    """Return what `compute(ranks)` returns on each rank; the first exception is raised."""
    calls, started = _Meeting(size), _Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: compute(ThreadRanks(rank, calls, started)), range(size)))
