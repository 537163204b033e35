"""Batches of loaders are those of torch."""

from collections.abc import Hashable, Iterator, Mapping
from multiprocessing.sharedctypes import RawArray
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from samestep.script.loaders import own_rows_of_loaders
from samestep.script.summary import Reading, Summary

SAMPLES = 12


class Points(Dataset[Any]):
    """Samples that count their reads, in memory that processes share, and no search finds."""

    def __init__(self, *, draws: bool) -> None:
        self.reads = RawArray("q", SAMPLES)
        self._draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        return torch.rand(2) + index if self._draws else torch.full((2,), float(index))


@pytest.fixture
def readings() -> Iterator[Mapping[Hashable, Reading]]:
    before = DataLoader._get_iterator
    with own_rows_of_loaders(lambda: None) as collected:
        yield collected
    assert DataLoader._get_iterator is before


def read(points: Points, size: int, workers: int = 0) -> torch.Tensor:
    torch.manual_seed(0)
    loader = DataLoader(points, batch_size=size, shuffle=True, num_workers=workers)
    return torch.cat([torch.as_tensor(batch) for batch in loader])


@pytest.mark.parametrize("size", [1, 5])
def test_batches_are_those_of_torch(size: int) -> None:
    of_torch = read(Points(draws=False), size)
    with own_rows_of_loaders(lambda: None) as readings:
        assert torch.equal(read(Points(draws=False), size), of_torch)
    (reading,) = readings.values()
    assert (reading.dataset, reading.state.draws, reading.how) == ("Points", False, "")
    assert list(Summary(readings).lines()) == []


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 5])
def test_draws_are_a_function_of_the_sample(size: int, workers: int, readings: Mapping[Hashable, Reading]) -> None:
    points = Points(draws=True)
    batches = read(points, size, workers)
    whole = read(Points(draws=True), SAMPLES)
    assert torch.equal(batches, whole)
    assert len(batches.unique()) == 2 * SAMPLES
    assert [reading.state.draws for reading in readings.values()] == [True, True]
    assert [line.partition(":")[0] for line in Summary(readings).lines()] == ["Points"]
    if workers == 0:
        # In copies of the process, the first batch is read again with and without seeds, in two orders.
        assert sum(points.reads) - SAMPLES <= 4 * size
