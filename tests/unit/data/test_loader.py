"""Loader: ranks together use the global order, each sample once and with the same bits, from any cursor."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from helpers.drawing_datasets import Draws, jittered
from samestep import launch
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.data.order import KEYED_ABOVE, KeyedPermutation, global_order
from samestep.distributed.world import World
from samestep.errors import CheckpointError, DataError, InputError
from samestep.launcher.launch import RankError
from samestep.microbatches import Cursor
from workers import loader as ranks_loader
from workers.loader import Seen

SEED = 5


def start_world(rank: int, size: int) -> World:
    """Return a world without communication, which a loader does not need."""
    return World(rank=rank, size=size, device=torch.device("cpu"))


def loader_of(rank: int = 0, ranks: int = 1, size: int = 20, **changes: Any) -> Loader:
    arguments: dict[str, Any] = {"batch_size": 8, "microbatches": 4, "seed": SEED, "shuffle": True}
    return Loader(Draws(size), world=start_world(rank, ranks), **{**arguments, "collate_fn": jittered, **changes})


def epoch_of(ranks: int, cursor: Cursor, **changes: Any) -> list[list[GlobalBatch]]:
    """Return the batches of one epoch by rank."""
    loaders = [loader_of(rank, ranks, **changes) for rank in range(ranks)]
    for loader in loaders:
        loader.cursor = cursor
    return [list(loader) for loader in loaders]


def used(by_rank: list[list[GlobalBatch]]) -> list[int]:
    """Return the samples of all ranks in order of batches and microbatches."""
    samples = []
    for batches in zip(*by_rank, strict=True):
        microbatches = [microbatch for batch in batches for microbatch in batch.local_microbatches]
        for microbatch in sorted(microbatches, key=lambda microbatch: microbatch.number):
            samples += [int(index) for index in microbatch.data[0]]
    return samples


@st.composite
def arguments_and_cursor(draw: st.DrawFn) -> dict[str, Any]:
    """Draw valid sizes, batches, microbatches and ranks, and a cursor."""
    size, microbatches = draw(st.integers(1, 50)), draw(st.integers(1, 8))
    batch_size = draw(st.integers(microbatches, 24))
    return {
        "size": size,
        "microbatches": microbatches,
        "batch_size": batch_size,
        "shuffle": draw(st.booleans()),
        "ranks": draw(st.integers(1, microbatches)),
        "cursor": Cursor(draw(st.integers(0, 3)), batch_size * draw(st.integers(0, (size - 1) // batch_size))),
    }


@settings(max_examples=150)
@given(arguments_and_cursor())
def test_ranks_together_use_the_global_order_from_the_cursor(drawn: dict[str, Any]) -> None:
    size, cursor = drawn["size"], drawn["cursor"]
    order = global_order(size, seed=SEED, epoch=cursor.epoch, shuffle=drawn["shuffle"])
    assert used(epoch_of(**drawn)) == order[cursor.samples :].tolist()


@settings(max_examples=150)
@given(arguments_and_cursor())
def test_batches_describe_their_samples(drawn: dict[str, Any]) -> None:
    by_rank = epoch_of(**drawn)
    position = drawn["cursor"]
    for batches in zip(*by_rank, strict=True):
        first, microbatches = batches[0], [m for batch in batches for m in batch.local_microbatches]
        assert all(batch.begin == position and batch.end == first.end for batch in batches)
        assert all(batch.indices.tolist() == first.indices.tolist() for batch in batches)
        assert [m.number for m in microbatches] == [n for n in range(first.microbatches) if first.samples_of(n)]
        assert all(m.data[0].tolist() == first.samples_of(m.number) for m in microbatches)
        assert all(m.size == len(first.samples_of(m.number)) for m in microbatches)
        position = first.end
    assert position == Cursor(drawn["cursor"].epoch + 1, 0)


@settings(max_examples=80)
@given(arguments_and_cursor())
def test_augmentation_does_not_depend_on_ranks(drawn: dict[str, Any]) -> None:
    alone = draws_of_all({**drawn, "ranks": 1})
    assert draws_of_all(drawn) == alone
    assert draws_of_all({**drawn, "ranks": drawn["microbatches"]}) == alone


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3))
def test_resume_between_batches_gives_the_remaining_batches(ranks: int, batches: int, epoch: int) -> None:
    whole = epoch_of(ranks, Cursor(epoch), size=37)
    tail = epoch_of(ranks, Cursor(epoch, 8 * batches), size=37)
    for rank in range(ranks):
        assert [as_lists(batch) for batch in tail[rank]] == [as_lists(batch) for batch in whole[rank][batches:]]


def as_lists(batch: GlobalBatch) -> Any:
    microbatches = [(m.number, m.size, *(tensor.tolist() for tensor in m.data)) for m in batch.local_microbatches]
    return batch.begin, batch.end, batch.indices.tolist(), batch.microbatches, microbatches


def draws_of_all(drawn: dict[str, Any]) -> Seen:
    """Return the random draws of each sample, over all ranks."""
    return {
        int(index): drawn.tolist()
        for batches in epoch_of(**drawn)
        for batch in batches
        for microbatch in batch.local_microbatches
        for index, drawn in zip(*microbatch.data, strict=True)
    }


def stepped(loader: Loader) -> list[GlobalBatch]:
    """Return the batches of an iteration with a step of each."""
    batches = []
    for batch in loader:
        loader.end_step(batch)
        batches.append(batch)
    return batches


def test_each_iteration_with_steps_is_the_next_epoch() -> None:
    loader = loader_of(size=20)
    epochs = [used([stepped(loader)]) for _ in range(3)]
    assert epochs == [global_order(20, seed=SEED, epoch=epoch, shuffle=True).tolist() for epoch in range(3)]
    assert loader.cursor == Cursor(3, 0)


def test_cursor_advances_with_each_step() -> None:
    loader = loader_of(size=20)
    cursors = []
    for batch in loader:
        cursors.append(loader.cursor)
        loader.end_step(batch)
        cursors.append(loader.cursor)
    assert cursors == [Cursor(0, 0), *[Cursor(0, 8)] * 2, *[Cursor(0, 16)] * 2, Cursor(1, 0)]


def test_a_stop_request_ends_epochs() -> None:
    loader = loader_of(size=20)
    epochs = []
    for epoch in samestep.epochs(loader, 9):
        epochs.append(epoch)
        for batch in loader:
            loader.end_step(batch, stop=epoch == 2)
    assert epochs == [0, 1, 2]


def test_an_interrupted_epoch_continues() -> None:
    loader = loader_of(size=20)
    first = next(iter(loader))
    loader.end_step(first)
    rest = list(loader)
    assert used([[first, *rest]]) == global_order(20, seed=SEED, epoch=0, shuffle=True).tolist()


def test_a_complete_epoch_is_independent_of_the_cursor() -> None:
    loader = loader_of(size=20)
    loader.cursor = Cursor(1, 16)
    assert used([list(loader.complete_epoch())]) == global_order(20, seed=SEED, epoch=1, shuffle=True).tolist()
    assert loader.cursor == Cursor(1, 16)


@pytest.mark.parametrize("samples", [5, 24])
def test_a_cursor_without_a_batch_raises(samples: int) -> None:
    loader = loader_of(size=20)
    loader.cursor = Cursor(0, samples)
    with pytest.raises(CheckpointError, match="the start of a global batch of 8, in an epoch of 20 samples"):
        next(iter(loader))


def test_augmentation_differs_by_epoch_and_by_seed() -> None:
    drawn = [
        draws_of_all({"ranks": 1, "cursor": Cursor(epoch), "seed": seed})
        for epoch, seed in [(0, SEED), (1, SEED), (0, SEED + 1)]
    ]
    for index in range(20):
        for generator in range(3):
            assert len({seen[index][generator] for seen in drawn}) == 3


def test_draws_in_collate_differ_by_microbatch_epoch_and_seed() -> None:
    drawn = {
        values[3]
        for epoch, seed in [(0, SEED), (1, SEED), (0, SEED + 1)]
        for values in draws_of_all({"ranks": 1, "cursor": Cursor(epoch), "seed": seed}).values()
    }
    assert len(drawn) == 3 * 12  # three batches of four microbatches each time


def test_augmentation_differs_by_sample() -> None:
    drawn = [values[:3] for values in draws_of_all({"ranks": 1, "cursor": Cursor()}).values()]
    assert all(len(set(column)) == 20 for column in zip(*drawn, strict=True))


def test_loading_preserves_the_generators() -> None:
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        batches = iter(loader_of())
        next(batches)
        next(batches)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("size", "batches"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_length_is_the_number_of_batches(size: int, batches: int) -> None:
    loader = loader_of(size=size)
    assert len(loader) == batches == len(list(loader))
    assert loader.samples == size


def test_more_ranks_than_microbatches_raise() -> None:
    with pytest.raises(InputError, match="5 ranks share the data but there are 4 microbatches"):
        loader_of(0, 5)


def test_batch_smaller_than_the_number_of_microbatches_raises() -> None:
    with pytest.raises(InputError, match="batch_size is 3 but there are 4 microbatches"):
        loader_of(batch_size=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 20.5),
        ("microbatches", -1),
        ("num_workers", -1),
        ("num_workers", True),
        ("num_workers", None),
        ("prefetch_factor", 0),
        ("prefetch_factor", 1.5),
        ("seed", -5),
        ("seed", 2**64),
        ("seed", 0.5),
    ],
)
def test_invalid_numbers_raise(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {value!r}") as caught:
        loader_of(**{name: value})
    assert caught.value.code == "E_VALUE"
    assert str(caught.value.fix).startswith(f"{name}=")


def test_empty_dataset_raises() -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        loader_of(size=0)


# --- keyed order ------------------------------------------------------------------------------------------


class Numbers:
    """Computed samples: any number of them without memory."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_together_use_the_keyed_order(ranks: int) -> None:
    order = KeyedPermutation(50, seed=SEED, epoch=2)[:].tolist()
    for start in (0, 16, 48):
        assert used(epoch_of(ranks, Cursor(2, start), size=50, order="keyed")) == order[start:]
    assert used(epoch_of(ranks, Cursor(2), size=50, order="keyed", drop_last=True)) == order[:48]


def test_order_is_keyed_above_a_number_of_samples() -> None:
    def order_of(size: int, **changes: Any) -> Any:
        world = start_world(0, 1)
        return Loader(Numbers(size), batch_size=8, world=world, **{"shuffle": True, **changes}).settings_of(0)["order"]

    assert order_of(KEYED_ABOVE) == "shuffled"
    assert order_of(KEYED_ABOVE + 1) == "keyed"
    assert order_of(KEYED_ABOVE + 1, order="shuffled") == "shuffled"
    assert order_of(KEYED_ABOVE + 1, shuffle=False) == "shuffled"
    assert order_of(100, order="keyed") == "keyed"


@pytest.mark.parametrize("changes", [{}, {"shuffle": False}, {"lengths": [1] * 20}])
def test_unknown_order_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="order of a loader is 'keyd'") as caught:
        loader_of(order="keyd", **changes)
    assert caught.value.code == "E_VALUE"


def test_checkpoint_without_an_order_keeps_that_of_its_version() -> None:
    loader = Loader(Numbers(KEYED_ABOVE + 1), batch_size=8, world=start_world(0, 1), shuffle=True)
    assert loader.adopt(loader.settings_of(0))["order"] == loader.settings_of(0)["order"] == "keyed"
    assert loader.adopt({"seed": 0}) == {"seed": 0, "order": "shuffled"}
    assert loader.settings_of(0)["order"] == "shuffled"
    chosen = Loader(Numbers(50), batch_size=8, world=start_world(0, 1), shuffle=True, order="keyed")
    assert chosen.adopt({})["order"] != chosen.settings_of(0)["order"]  # which a resumption refuses


@pytest.mark.parametrize("changes", [{"lengths": [1] * 20}, {"sampler": range(20), "shuffle": False}])
def test_keyed_order_excludes_other_orders(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        loader_of(order="keyed", **changes)
    assert caught.value.code == "E_LOADER"


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_billion_samples_need_no_memory_per_sample(shuffle: bool, workers: int) -> None:
    size, batch_size = 10**9, 4096
    last = (size - 1) // batch_size * batch_size
    loader = Loader(
        Numbers(size),
        batch_size=batch_size,
        microbatches=8,
        world=start_world(1, 3),
        shuffle=shuffle,
        num_workers=workers,
    )
    list(loader_of())  # imports, and memory of the first use
    tracemalloc.start()
    try:
        for start in (0, last // batch_size // 2 * batch_size, last):
            loader.cursor = Cursor(3, start)
            batches = iter(loader)
            batch = next(batches)
            assert batch.size == min(batch_size, size - start)
            for microbatch in batch.local_microbatches:
                assert microbatch.data.tolist() == batch.samples_of(microbatch.number)
            assert isinstance(batches, Generator)
            batches.close()
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
        loader.close()


# --- with workers -----------------------------------------------------------------------------------------


@pytest.mark.timeout(40)
def test_samples_do_not_depend_on_ranks_or_workers() -> None:
    alone = launch(ranks_loader.passes, 0, processes=1)[0]
    for ranks, workers in [(1, 2), (3, 0), (3, 2), (4, 2)]:
        together = launch(ranks_loader.passes, workers, processes=ranks)
        assert [merged(seen) for seen in zip(*together, strict=True)] == alone


def merged(seen: tuple[Seen, ...]) -> Seen:
    together: Seen = {}
    for samples in seen:
        assert not together.keys() & samples.keys()
        together |= samples
    return together


@pytest.mark.timeout(40)
@pytest.mark.parametrize("workers", [0, 2])
def test_data_error_of_a_sample_is_unchanged(workers: int) -> None:
    kind, text = launch(ranks_loader.failure, workers, "DataError", processes=1)
    assert kind == "DataError"
    assert text == "sample 11 is not an image [E_DATA]\n  expected: every file is an image\n  fix:      remove it"


@pytest.mark.timeout(40)
@pytest.mark.parametrize("workers", [0, 2])
def test_other_error_of_a_dataset_keeps_type_and_message(workers: int) -> None:
    kind, text = launch(ranks_loader.failure, workers, "ValueError", processes=1)
    assert kind == "ValueError"
    assert "sample 11 is odd" in text


@pytest.mark.timeout(40)
def test_a_rank_with_a_referenced_loader_ends_without_output(tmp_path: Path) -> None:
    for _ in range(8):
        assert launch(ranks_loader.end_with_workers_alive, processes=2, log_dir=tmp_path) == 8
    assert (tmp_path / "rank-1.log").read_text() == ""


@pytest.mark.timeout(40)
@pytest.mark.skipif(sys.platform != "linux", reason="uses a Linux feature")
def test_workers_do_not_outlive_a_failed_rank() -> None:
    with pytest.raises(RankError, match="workers: ") as failed:
        launch(ranks_loader.fail_with_workers_alive, processes=1)
    match = re.search(r"workers: ([0-9 ]+)", str(failed.value))
    assert match is not None
    workers = [int(process) for process in match[1].split()]
    assert len(workers) == 2
    for _ in range(100):
        if not any(is_running(process) for process in workers):
            break
        time.sleep(0.05)
    left = [process for process in workers if is_running(process)]
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_with_workers_yields_the_same_batches_from_the_cursor() -> None:
    own = loader_of()
    own.cursor = Cursor(1, 8)
    other = own.with_workers(2, 1)
    assert (other.num_workers, other.prefetch_factor, own.num_workers) == (2, 1, 0)
    try:
        first = next(iter(other))
    finally:
        other.close()
    assert own.cursor == Cursor(1, 8)
    expected = next(iter(own))
    assert first.indices.tolist() == expected.indices.tolist()
    for microbatch, same in zip(first.local_microbatches, expected.local_microbatches, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(microbatch.data, same.data, strict=True))


def test_a_closed_loader_has_no_workers_and_continues() -> None:
    loader = loader_of(num_workers=2, persistent_workers=True)
    before = {child.pid for child in multiprocessing.active_children()}
    first = next(iter(loader))
    loader.end_step(first)
    started = {child.pid for child in multiprocessing.active_children()} - before
    assert len(started) == 2
    loader.close()
    assert not started & {child.pid for child in multiprocessing.active_children()}
    loader.close()  # no effect
    second = next(iter(loader))
    loader.close()
    assert [first.begin.samples, second.begin.samples] == [0, 8]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_the_iteration_unless_they_persist(persistent: bool) -> None:
    loader = loader_of(num_workers=1, persistent_workers=persistent)
    before = {child.pid for child in multiprocessing.active_children()}
    first = [as_lists(batch) for batch in loader]
    kept = {child.pid for child in multiprocessing.active_children()} - before
    assert len(kept) == persistent
    assert [as_lists(batch) for batch in loader] == first
    assert {child.pid for child in multiprocessing.active_children()} - before == kept
    loader.close()


def test_prefetch_sets_the_microbatches_ahead_per_worker() -> None:
    counts = []
    for prefetch in (1, 3):
        loader = loader_of(num_workers=1, prefetch_factor=prefetch)
        batches = iter(loader)
        next(batches)
        counts.append(loader._used[0]._iterator._tasks_outstanding)  # type: ignore[union-attr]
        loader.close()
    assert counts == [1, 3]


class BrokenTransfer:
    """Object whose transfer breaks the connection; the worker is then killed or continues."""

    def __init__(self, signal_after: float | None) -> None:
        self._signal_after = signal_after

    def __reduce__(self) -> tuple[Any, ...]:
        if self._signal_after is not None:
            threading.Timer(self._signal_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return _break, ()


def _break() -> None:
    raise ConnectionResetError("the sockets of an ending process are closed")


@pytest.mark.parametrize("signal_after", [0.3, None])
def test_a_worker_killed_during_a_transfer_is_named(signal_after: float | None) -> None:
    loader = loader_of(num_workers=1, collate_fn=lambda samples: BrokenTransfer(signal_after))
    began = time.monotonic()
    killed = r"DataLoader worker \(pid\(?s?\)? ?\d+\) .*(killed|exited unexpectedly)"
    with pytest.raises(ConnectionResetError if signal_after is None else RuntimeError) as failed:
        next(iter(loader))
    loader.close()
    assert (re.match(killed, str(failed.value)) is None) == (signal_after is None)
    assert time.monotonic() - began > (signal_after or 1)


@pytest.mark.parametrize(("batch_size", "number"), [(16, 1), (32, 2), (64, 2), (256, 8)])
def test_auto_follows_the_batch_size_alone(batch_size: int, number: int) -> None:
    (batch, *_) = loader_of(size=512, batch_size=batch_size, microbatches="auto")
    assert batch.microbatches == number


def test_auto_divides_a_short_batch_into_microbatches_of_two_or_more() -> None:
    *_, last = loader_of(size=67, batch_size=64, microbatches="auto")
    assert (last.size, last.microbatches) == (3, 1)
    *_, last = loader_of(size=67, batch_size=64, microbatches=2)
    assert (last.size, last.microbatches) == (3, 2), "an explicit number stays"


@pytest.mark.parametrize(("size", "batches"), [(20, 2), (16, 2), (8, 1)])
def test_drop_last_leaves_out_the_short_batch(size: int, batches: int) -> None:
    loader = loader_of(size=size, drop_last=True)
    epoch = list(loader)
    assert [batch.size for batch in epoch] == [8] * batches
    assert (len(loader), loader.samples, epoch[-1].end) == (batches, 8 * batches, Cursor(1, 0))
    order = global_order(size, seed=SEED, epoch=0, shuffle=True)
    assert [index for batch in epoch for index in batch.indices] == order[: 8 * batches].tolist()


def test_drop_last_needs_a_complete_batch() -> None:
    with pytest.raises(DataError, match="7 samples, fewer than one batch of 8") as caught:
        loader_of(size=7, drop_last=True)
    assert caught.value.code == "E_EMPTY_DATASET"
