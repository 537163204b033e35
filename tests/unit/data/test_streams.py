"""Streams: every sample once, in an order that is equal for any slices and local to few files."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep.cursor import Cursor
from samestep.data.permutations import Order
from samestep.data.sample_files import fingerprint_of
from samestep.data.streams import StreamDataset
from samestep.errors import DataError, InputError

FILES = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


class NumberFiles:
    """Files whose samples are pairs of a file number and a position."""

    def __init__(self, sizes: Sequence[int], prefix: str = "file") -> None:
        self.sizes = list(sizes)
        self.names = [f"{prefix}-{number}" for number in range(len(self.sizes))]
        self.fingerprint = fingerprint_of(self.names, self.sizes)
        self.reads: list[int] = []

    def read(self, file: int, index: int) -> torch.Tensor:
        assert 0 <= index < self.sizes[file]
        self.reads.append(file)
        return torch.tensor([file, index])


def order_of(files: list[int], window: int = 30, *, seed: int = 3, epoch: int = 1, shuffle: bool = True) -> Order:
    dataset = StreamDataset(NumberFiles(files), window=window)
    return dataset.order(seed=seed, epoch=epoch, shuffle=shuffle)


@settings(max_examples=20, deadline=None)
@given(FILES, st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_every_sample_occurs_once(files: list[int], window: int, seed: int, epoch: int) -> None:
    order = order_of(files, window, seed=seed, epoch=epoch)
    assert sorted(order[:].tolist()) == list(range(sum(files)))


@settings(max_examples=20, deadline=None)
@given(FILES, st.integers(1, 50), st.slices(200), st.booleans())
def test_slices_are_those_of_the_whole_order(files: list[int], window: int, positions: slice, shuffle: bool) -> None:
    order = order_of(files, window, shuffle=shuffle)
    assert order[positions].tolist() == order[:][positions].tolist()


def test_order_is_stable_between_versions() -> None:
    order = order_of([5, 7, 6, 2], window=6)
    assert order[:].tolist() == [
        *[9, 5, 10, 8, 7, 6, 12, 11, 14, 16],
        *[15, 13, 0, 2, 17, 18, 19, 1, 3, 4],
    ]


def test_a_window_is_in_random_order_and_has_few_files() -> None:
    window = 100
    order = order_of([50] * 200, window)[:].tolist()
    for start in range(0, len(order), window):
        part = order[start : start + window]
        assert len({index // 50 for index in part}) == 2
        assert part != sorted(part)


def test_position_in_a_large_epoch_costs_the_same() -> None:
    """Any position of 10^12 samples, without memory per sample."""
    order = order_of([10**8] * 10_000, 4096)
    assert len(order) == 10**12
    seen = set()
    for start in (0, 10**12 // 2 // 4096 * 4096, 10**12 - 10**12 % 4096):
        seen.update(order[start : start + 4096].tolist())
    assert len(seen) == 2 * 4096 + 10**12 % 4096


def test_iteration_resumes_at_any_batch() -> None:
    def batches(cursor: Cursor) -> list[list[list[int]]]:
        dataset = StreamDataset(NumberFiles([10, 0, 17, 9, 30, 3]), window=8)
        loader = samestep.loader(dataset, 16, shuffle=True, seed=5)
        loader.cursor = cursor
        return [torch.as_tensor(batch).tolist() for batch in loader]

    whole = batches(Cursor(0, 0))
    assert len(whole) == 5
    assert batches(Cursor(0, 32)) == whole[2:]


def test_stream_without_samples_or_window_is_refused() -> None:
    for files in ([], [0, 0]):
        with pytest.raises(DataError) as empty:
            StreamDataset(NumberFiles(files))
        assert empty.value.code == "E_DATA"
    with pytest.raises(InputError) as caught:
        StreamDataset(NumberFiles([10]), window=0)
    assert caught.value.code == "E_VALUE"
