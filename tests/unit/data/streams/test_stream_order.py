"""Order of streams: every sample once, equal for any slices, local to few files, and independent of ranks."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.number_files import NumberFiles
from samestep.data.order import Order
from samestep.data.streams.dataset import BatchSizes, StreamDataset

FILES = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


@st.composite
def batch_sizes(draw: st.DrawFn) -> BatchSizes:
    microbatches = draw(st.integers(1, 10))
    return BatchSizes(draw(st.integers(microbatches, 40)), microbatches, draw(st.integers(1, microbatches)))


def order_of(
    source: Any, sizes: BatchSizes, *, window: int = 30, seed: int = 3, epoch: int = 1, shuffle: bool = True
) -> Order:
    return StreamDataset(source, window=window).order(sizes, seed=seed, epoch=epoch, shuffle=shuffle)


def slots_of(order: Order, sizes: BatchSizes) -> list[list[int]]:
    """Return the samples of each slot in complete batches."""
    batches = len(order) // sizes.batch_size
    indices = order[: batches * sizes.batch_size].reshape(batches, sizes.microbatches, -1)
    return [indices[:, slot].reshape(-1).tolist() for slot in range(sizes.microbatches)]


@settings(max_examples=20, deadline=None)
@given(FILES, batch_sizes(), st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_every_sample_occurs_once(files: list[int], sizes: BatchSizes, window: int, seed: int, epoch: int) -> None:
    order = order_of(NumberFiles(files), sizes, window=window, seed=seed, epoch=epoch)
    assert sorted(order[:].tolist()) == list(range(sum(files)))


@settings(max_examples=20, deadline=None)
@given(FILES, batch_sizes(), st.integers(1, 50), st.slices(200))
def test_slices_are_those_of_the_whole_order(
    files: list[int], sizes: BatchSizes, window: int, positions: slice
) -> None:
    for shuffle in (True, False):
        order = order_of(NumberFiles(files), sizes, window=window, shuffle=shuffle)
        assert order[positions].tolist() == order[:][positions].tolist()


def test_order_is_stable_between_versions() -> None:
    order = order_of(NumberFiles([5, 7, 6, 2]), BatchSizes(8, 2, 2), window=6)
    assert order[:].tolist() == [9, 5, 10, 8, 19, 17, 18, 0, 7, 6, 12, 11, 15, 16, 4, 3, 14, 13, 2, 1]


def test_a_slot_has_its_own_range_and_few_files_per_window() -> None:
    files, sizes, window = NumberFiles([50] * 200), BatchSizes(64, 8, 8), 100
    slots = slots_of(order_of(files, sizes, window=window), sizes)
    touched = [{index // 50 for index in slot} for slot in slots]
    assert [len(part) for part in touched] == [25] * 8  # of 200 files
    assert len(set.union(*touched)) == 200
    for slot in slots:
        for start in range(0, len(slot) - window, window):
            assert len({index // 50 for index in slot[start : start + window]}) <= 3
    # A window is in random order, and spans its files.
    first = slots[0][:window]
    assert first != sorted(first)
    assert len(set(first)) == window


def test_position_in_a_large_epoch_costs_the_same() -> None:
    """Any position of 10^12 samples, without memory per sample."""
    sizes = BatchSizes(4096, 8, 8)
    order = order_of(NumberFiles([10**8] * 10_000), sizes, window=4096)
    assert len(order) == 10**12
    seen = set()
    for start in (0, 10**12 // 2 // 4096 * 4096, 10**12 - 10**12 % 4096):
        seen.update(order[start : start + 4096].tolist())
    assert len(seen) == 2 * 4096 + 10**12 % 4096
