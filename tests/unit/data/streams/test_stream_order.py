"""Order of streams: every sample once, equal for any slices, local to few files, and independent of ranks."""

import hashlib
from collections import Counter
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.number_files import NumberFiles
from samestep.data.streams.dataset import StreamDataset
from samestep.data.streams.mixture import MixtureSource
from samestep.data.streams.order import BatchSizes, SlotOrder, StreamOrder
from samestep.errors import InputError

FILES = st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(any)


@st.composite
def batch_sizes(draw: st.DrawFn) -> BatchSizes:
    microbatches = draw(st.integers(1, 10))
    return BatchSizes(draw(st.integers(microbatches, 40)), microbatches, draw(st.integers(1, microbatches)))


def order_of(
    source: Any, sizes: BatchSizes, *, window: int = 30, seed: int = 3, epoch: int = 1, shuffle: bool = True
) -> StreamOrder:
    return StreamDataset(source, window=window).order(sizes, seed=seed, epoch=epoch, shuffle=shuffle)


def slots_of(order: StreamOrder, sizes: BatchSizes) -> list[list[int]]:
    """Return the samples of each slot in complete batches."""
    batches = len(order) // sizes.batch_size
    indices = order[: batches * sizes.batch_size].reshape(batches, sizes.microbatches, -1)
    return [indices[:, slot].reshape(-1).tolist() for slot in range(sizes.microbatches)]


@settings(max_examples=20, deadline=None)
@given(FILES, batch_sizes(), st.integers(1, 50), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_every_sample_occurs_once(files: list[int], sizes: BatchSizes, window: int, seed: int, epoch: int) -> None:
    order = order_of(NumberFiles(files), sizes, window=window, seed=seed, epoch=epoch)
    draws = order.draws(slice(0, len(order)))
    assert sorted(draws.indices.tolist()) == list(range(sum(files)))
    assert not draws.repeats.any()


@settings(max_examples=20, deadline=None)
@given(FILES, batch_sizes(), st.integers(1, 50), st.slices(200))
def test_slices_are_those_of_the_whole_order(
    files: list[int], sizes: BatchSizes, window: int, positions: slice
) -> None:
    for shuffle in (True, False):
        order = order_of(NumberFiles(files), sizes, window=window, shuffle=shuffle)
        assert order[positions].tolist() == order[:][positions].tolist()


def test_order_without_shuffle_is_that_of_the_files() -> None:
    order = order_of(NumberFiles([3, 0, 4]), BatchSizes(2, 2, 1), shuffle=False)
    assert order[:].tolist() == list(range(7))
    assert order.files_ahead(slice(0, 2), [0]) == (0, 1)
    assert order.files_ahead(slice(2, 4), [0]) == (0, 2)
    assert order.files_ahead(slice(4, 6), [0]) == (2,)


def test_order_is_stable_between_versions() -> None:
    order = order_of(NumberFiles([5, 7, 6, 2]), BatchSizes(8, 2, 2), window=6)
    assert order[:].tolist() == [9, 5, 10, 8, 19, 17, 18, 0, 7, 6, 12, 11, 15, 16, 4, 3, 14, 13, 2, 1]
    sources = {"a": NumberFiles([100] * 50), "b": NumberFiles([30] * 7)}
    mixed = order_of(MixtureSource(sources, {"a": 2, "b": 1}), BatchSizes(64, 8, 8))
    assert hashlib.sha256(mixed[:].astype("<i8").tobytes()).hexdigest()[:16] == "974f73239a225f87"


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 2}, {"window": 31}])
def test_seeds_epochs_and_windows_have_other_orders(change: dict[str, int]) -> None:
    files, sizes = NumberFiles([40] * 30), BatchSizes(32, 4, 4)
    assert order_of(files, sizes)[:100].tolist() != order_of(files, sizes, **change)[:100].tolist()


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


def test_files_of_slots_are_announced_before_their_use() -> None:
    files, sizes, window = NumberFiles([50] * 200), BatchSizes(64, 8, 8), 100
    order = order_of(files, sizes, window=window)
    known: set[int] = set()
    for start in range(0, len(order), 64):
        span = slice(start, min(start + 64, len(order)))
        ahead = order.files_ahead(span, [2, 3])
        assert len(ahead) == len(set(ahead)) <= 2 * (3 + 3 + 1)
        known |= set(ahead)
        if span.stop - span.start == 64:
            used = {int(index) // 50 for index in order[span][16:32]}
            assert used <= set(ahead)
    # Files of the two slots alone, and the next one of a range that begins in a file.
    assert len(known) <= 2 * 26


def test_position_in_a_large_epoch_costs_the_same() -> None:
    """Any position of 10^12 samples, without memory per sample."""
    sizes = BatchSizes(4096, 8, 8)
    order = order_of(NumberFiles([10**8] * 10_000), sizes, window=4096)
    assert len(order) == 10**12
    seen = set()
    for start in (0, 10**12 // 2 // 4096 * 4096, 10**12 - 10**12 % 4096):
        seen.update(order[start : start + 4096].tolist())
    assert len(seen) == 2 * 4096 + 10**12 % 4096


# --- mixtures ---------------------------------------------------------------------------------------------


def mixture(samples: int | None = None) -> MixtureSource:
    sources = {"web": NumberFiles([100] * 40, "web"), "code": NumberFiles([37] * 10), "books": NumberFiles([15] * 5)}
    return MixtureSource(sources, {"web": 0.7, "code": 0.2, "books": 0.1}, samples=samples)


def sources_of(indices: Any) -> dict[str, float]:
    names = numpy.searchsorted([4000, 4370], indices, side="right")
    counts = Counter(names.tolist())
    return {name: counts[number] / len(indices) for number, name in enumerate(("web", "code", "books"))}


def test_weights_hold_in_every_window_of_a_slot() -> None:
    sizes = BatchSizes(80, 8, 8)
    order = order_of(mixture(), sizes, window=50)
    for slot in slots_of(order, sizes):
        for start in range(0, len(slot) - 50, 50):
            assert sources_of(slot[start : start + 50]) == {"web": 0.7, "code": 0.2, "books": 0.1}


def test_draws_of_a_source_continue_over_epochs() -> None:
    """After two epochs of 2,500 draws, 3,500 of 4,000 samples of the largest source were drawn once, none twice."""
    drawn: Counter[int] = Counter()
    for epoch in range(2):
        drawn.update(order_of(mixture(2500), BatchSizes(50, 5, 5), window=50, epoch=epoch)[:].tolist())
    web = [index for index in drawn if index < 4000]
    assert len(web) == 3500
    assert {drawn[index] for index in web} == {1}
    books = [drawn[index] for index in range(4370, 4445)]  # 500 draws of 75 samples
    assert (sum(books), max(books) - min(books)) == (500, 1)


@settings(max_examples=12, deadline=None)
@given(batch_sizes(), st.integers(10, 60), st.integers(1, 6000), st.integers(0, 10**6))
def test_draws_of_a_mixture_are_distinct_and_equal_for_any_slices(
    sizes: BatchSizes, window: int, samples: int, epoch: int
) -> None:
    try:
        order = order_of(mixture(samples), sizes, window=window, epoch=epoch)
    except InputError as error:
        assert samples < 200 and error.code == "E_MIXTURE"  # a slot without a sample of a source
        return
    draws = order.draws(slice(0, samples))
    assert len(order) == samples
    assert len(set(zip(draws.indices.tolist(), draws.repeats.tolist(), strict=True))) == samples
    part = order.draws(slice(samples // 3, samples))
    assert part.indices.tolist() == draws.indices[samples // 3 :].tolist()
    assert part.repeats.tolist() == draws.repeats[samples // 3 :].tolist()


@pytest.mark.parametrize(
    ("sizes", "weights", "window"),
    [([100, 5], (1, 1), 30), ([100, 100], (1, 0.001), 30)],
    ids=["fewer samples than microbatches", "no sample in a window"],
)
def test_mixture_that_does_not_fit_is_refused(sizes: list[int], weights: tuple[float, float], window: int) -> None:
    sources = {str(number): NumberFiles([size]) for number, size in enumerate(sizes)}
    source = MixtureSource(sources, dict(zip(sources, weights, strict=True)))
    with pytest.raises(InputError) as caught:
        order_of(source, BatchSizes(32, 8, 8), window=window)
    assert caught.value.code == "E_MIXTURE"


def test_order_of_one_source_is_that_of_its_mixture() -> None:
    files, sizes = NumberFiles([40] * 30), BatchSizes(32, 4, 4)
    alone, mixed = order_of(files, sizes), order_of(MixtureSource({"a": files}, {"a": 3.0}), sizes)
    assert isinstance(alone, SlotOrder)
    assert alone[:].tolist() == mixed[:].tolist()
