"""All ranks together see the global order, each sample once and the same, from wherever they start."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ranks_loader
from drawing_datasets import Draws, jittered
from ranks_loader import Seen
from samestep import launch
from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch
from samestep.data.loader import Loader
from samestep.data.order import global_order
from samestep.errors import DataError, InputError
from samestep.runtime.launch import RankError
from samestep.runtime.world import World

SEED = 5


def world_of(rank: int, size: int) -> World:
    """A rank that never communicates: a loader has no need to."""
    return World(rank=rank, size=size, device=torch.device("cpu"), stop_requested=lambda: False)


def loader_of(rank: int = 0, ranks: int = 1, size: int = 20, **changes: Any) -> Loader:
    given: dict[str, Any] = {"batch_size": 8, "shards": 4, "seed": SEED, "shuffle": True, "collate": jittered}
    return Loader(Draws(size), world=world_of(rank, ranks), **{**given, **changes})


def epoch_of(ranks: int, cursor: Cursor, **changes: Any) -> list[list[GlobalBatch]]:
    """The batches of one pass, by rank."""
    loaders = [loader_of(rank, ranks, **changes) for rank in range(ranks)]
    for loader in loaders:
        loader.cursor = cursor
    return [list(loader) for loader in loaders]


def used(by_rank: list[list[GlobalBatch]]) -> list[int]:
    """The samples of all ranks, batch by batch and shard by shard."""
    found = []
    for batches in zip(*by_rank, strict=True):
        parts = sorted((part for batch in batches for part in batch.parts), key=lambda part: part.number)
        found += [int(index) for part in parts for index in part.data[0]]
    return found


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes, batches, shards and ranks that go together, and a cursor."""
    size, shards = draw(st.integers(1, 50)), draw(st.integers(1, 8))
    return {
        "size": size,
        "shards": shards,
        "batch_size": draw(st.integers(shards, 24)),
        "shuffle": draw(st.booleans()),
        "ranks": draw(st.integers(1, shards)),
        "cursor": Cursor(draw(st.integers(0, 3)), draw(st.integers(0, size - 1))),
    }


@settings(max_examples=150)
@given(situations())
def test_ranks_together_use_the_global_order_from_the_cursor_on(situation: dict[str, Any]) -> None:
    size, cursor = situation["size"], situation["cursor"]
    order = global_order(size, seed=SEED, epoch=cursor.epoch, shuffle=situation["shuffle"])
    assert used(epoch_of(**situation)) == order[cursor.samples :].tolist()


@settings(max_examples=150)
@given(situations())
def test_batches_say_what_they_are_made_of(situation: dict[str, Any]) -> None:
    by_rank = epoch_of(**situation)
    position = situation["cursor"]
    for batches in zip(*by_rank, strict=True):
        first, parts = batches[0], [part for batch in batches for part in batch.parts]
        assert all(batch.begin == position and batch.end == first.end for batch in batches)
        assert all(batch.indices.tolist() == first.indices.tolist() for batch in batches)
        assert [part.number for part in parts] == [n for n in range(first.shards) if first.samples_of(n)]
        assert all(part.data[0].tolist() == first.samples_of(part.number) for part in parts)
        assert all(part.size == len(first.samples_of(part.number)) for part in parts)
        position = first.end
    assert position == Cursor(situation["cursor"].epoch + 1, 0)


@settings(max_examples=80)
@given(situations())
def test_samples_are_augmented_alike_on_any_ranks(situation: dict[str, Any]) -> None:
    alone = draws_of_all({**situation, "ranks": 1})
    assert draws_of_all(situation) == alone
    assert draws_of_all({**situation, "ranks": situation["shards"]}) == alone


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 3))
def test_resuming_between_batches_gives_the_tail(ranks: int, batches: int, epoch: int) -> None:
    whole = epoch_of(ranks, Cursor(epoch), size=37)
    tail = epoch_of(ranks, Cursor(epoch, 8 * batches), size=37)
    for rank in range(ranks):
        assert [shown(batch) for batch in tail[rank]] == [shown(batch) for batch in whole[rank][batches:]]


def shown(batch: GlobalBatch) -> Any:
    parts = [(part.number, part.size, *(tensor.tolist() for tensor in part.data)) for part in batch.parts]
    return batch.begin, batch.end, batch.indices.tolist(), batch.shards, parts


def draws_of_all(situation: dict[str, Any]) -> Seen:
    """What each sample looks like on all ranks together."""
    return {
        int(index): drawn.tolist()
        for batches in epoch_of(**situation)
        for batch in batches
        for part in batch.parts
        for index, drawn in zip(*part.data, strict=True)
    }


def test_an_iteration_is_an_epoch_and_the_next_is_the_next() -> None:
    loader = loader_of(size=20)
    epochs = [used([list(loader)]) for _ in range(3)]
    assert epochs == [global_order(20, seed=SEED, epoch=epoch, shuffle=True).tolist() for epoch in range(3)]
    assert loader.cursor == Cursor(3, 0)


def test_the_cursor_moves_with_the_batches_handed_out() -> None:
    loader = loader_of(size=20)
    cursors = [loader.cursor]
    for _ in loader:
        cursors.append(loader.cursor)
    assert cursors == [Cursor(0, 0), Cursor(0, 8), Cursor(0, 16), Cursor(1, 0)]


def test_leaving_an_epoch_and_coming_back_goes_on() -> None:
    loader = loader_of(size=20)
    first = next(iter(loader))
    rest = list(loader)
    assert used([[first, *rest]]) == global_order(20, seed=SEED, epoch=0, shuffle=True).tolist()


def test_augmentation_differs_by_epoch_and_by_seed() -> None:
    drawn = [
        draws_of_all({"ranks": 1, "cursor": Cursor(epoch), "seed": seed})
        for epoch, seed in [(0, SEED), (1, SEED), (0, SEED + 1)]
    ]
    for index in range(20):
        for generator in range(3):
            assert len({seen[index][generator] for seen in drawn}) == 3


def test_collating_draws_differ_by_shard_epoch_and_seed() -> None:
    drawn = {
        values[3]
        for epoch, seed in [(0, SEED), (1, SEED), (0, SEED + 1)]
        for values in draws_of_all({"ranks": 1, "cursor": Cursor(epoch), "seed": seed}).values()
    }
    assert len(drawn) == 3 * 12  # three batches of four shards each time


def test_samples_are_augmented_each_in_its_own_way() -> None:
    drawn = [values[:3] for values in draws_of_all({"ranks": 1, "cursor": Cursor()}).values()]
    assert all(len(set(column)) == 20 for column in zip(*drawn, strict=True))


def test_loading_leaves_the_generators_as_they_were() -> None:
    with torch.random.fork_rng(devices=[]):
        batches = iter(loader_of())
        next(batches)  # torch's own loader draws a seed when it begins
        before = torch.get_rng_state()
        next(batches)
        assert torch.equal(torch.get_rng_state(), before)


def test_making_a_batch_again_changes_nothing() -> None:
    plain, again = loader_of(ranks=2), loader_of(ranks=2)
    for batch, same in zip(plain, again, strict=True):
        state = torch.get_rng_state()
        again.make_again(same)
        assert torch.equal(state, torch.get_rng_state())
        assert again.cursor == plain.cursor
        assert shown(batch) == shown(same)


@pytest.mark.parametrize(("size", "batches"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_length_is_in_batches(size: int, batches: int) -> None:
    loader = loader_of(size=size)
    assert len(loader) == batches == len(list(loader))
    assert loader.samples == size


def test_more_ranks_than_shards_are_refused() -> None:
    with pytest.raises(InputError, match="5 ranks share the data but the recipe has 4 shards"):
        loader_of(0, 5)


def test_a_batch_smaller_than_its_shards_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size is 3 but there are 4 shards"):
        loader_of(batch_size=3)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        loader_of(size=0)


# --- with workers -----------------------------------------------------------------------------------------


@pytest.mark.timeout(40)
def test_neither_ranks_nor_workers_change_a_sample() -> None:
    alone = launch(ranks_loader.passes, 0, processes=1)[0]
    for ranks, workers in [(1, 2), (3, 0), (3, 2), (4, 2)]:
        together = launch(ranks_loader.passes, workers, processes=ranks)
        assert [merged(seen) for seen in zip(*together, strict=True)] == alone


@pytest.mark.timeout(40)
def test_an_epoch_that_was_left_goes_on_and_a_cursor_goes_back() -> None:
    first, second, begun, rest, again = launch(ranks_loader.passes, 2, processes=1)[0]
    assert sorted(first) == sorted(second) == list(range(37))
    assert list(begun) + list(rest) == global_order(37, seed=3, epoch=2, shuffle=True).tolist()
    assert again == second != first


def merged(seen: tuple[Seen, ...]) -> Seen:
    together: Seen = {}
    for samples in seen:
        assert not together.keys() & samples.keys()
        together |= samples
    return together


@pytest.mark.timeout(40)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_wrong_with_a_sample_is_told_as_it_was_said(workers: int) -> None:
    kind, text = launch(ranks_loader.failure, workers, "DataError", processes=1)
    assert kind == "DataError"
    assert text == "sample 11 is not an image\n  rule: every file is an image\n  do:   remove it"


@pytest.mark.timeout(40)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_a_dataset_keeps_its_type_and_message(workers: int) -> None:
    kind, text = launch(ranks_loader.failure, workers, "ValueError", processes=1)
    assert kind == "ValueError"
    assert "sample 11 is odd" in text


@pytest.mark.timeout(40)
def test_a_loader_that_is_kept_does_not_keep_its_rank() -> None:
    assert launch(ranks_loader.end_with_workers_alive, processes=1) == 8


@pytest.mark.timeout(40)
def test_a_rank_whose_loader_is_kept_ends_without_a_word(tmp_path: Path) -> None:
    for _ in range(8):
        launch(ranks_loader.end_with_workers_alive, processes=2, log_dir=tmp_path)
    assert (tmp_path / "rank-1.log").read_text() == ""


@pytest.mark.timeout(40)
def test_a_script_ends_though_its_loader_is_kept() -> None:
    code = f"import sys\nsys.path[:] = {sys.path!r}\nimport ranks_loader\nprint(ranks_loader.end_with_workers_alive())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == ("8\n", 0), done.stderr


@pytest.mark.timeout(40)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is asked for on Linux alone")
def test_workers_do_not_outlive_a_rank_that_fails() -> None:
    with pytest.raises(RankError, match="workers: ") as failed:
        launch(ranks_loader.fail_with_workers_alive, processes=1)
    found = re.search(r"workers: ([0-9 ]+)", str(failed.value))
    assert found is not None
    workers = [int(process) for process in found[1].split()]
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
    except FileNotFoundError:
        return False


def test_other_workers_make_the_same_batches_from_the_cursor_on() -> None:
    own = loader_of()
    own.cursor = Cursor(1, 8)
    other = own.with_workers(2, 1)
    assert (other.workers, other.prefetch, own.workers) == (2, 1, 0)
    try:
        first = next(iter(other))
    finally:
        other.close()
    assert own.cursor == Cursor(1, 8)
    expected = next(iter(own))
    assert first.indices.tolist() == expected.indices.tolist()
    for part, same in zip(first.parts, expected.parts, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(part.data, same.data, strict=True))


def test_a_loader_that_is_closed_has_no_workers_and_goes_on() -> None:
    loader = loader_of(workers=2)
    before = {child.pid for child in multiprocessing.active_children()}
    batches = [next(iter(loader))]
    started = {child.pid for child in multiprocessing.active_children()} - before
    assert len(started) == 2
    loader.close()
    assert not started & {child.pid for child in multiprocessing.active_children()}
    loader.close()  # once more does nothing
    batches.append(next(iter(loader)))
    loader.close()
    assert [batch.begin.samples for batch in batches] == [0, 8]


def test_workers_make_as_many_shards_ahead_as_they_are_told() -> None:
    counts = []
    for prefetch in (1, 3):
        loader = loader_of(workers=1, prefetch=prefetch)
        next(iter(loader))
        counts.append(loader._loader._iterator._tasks_outstanding)  # type: ignore[union-attr]
        loader.close()
    assert counts == [1, 3]


class Torn:
    """What a worker hands over while its connection breaks; then it is killed, or goes on."""

    def __init__(self, signal_after: float | None) -> None:
        self._signal_after = signal_after

    def __reduce__(self) -> tuple[Any, ...]:
        if self._signal_after is not None:
            threading.Timer(self._signal_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return _tear, ()


def _tear() -> None:
    raise ConnectionResetError("as a process that ends closes its sockets")


@pytest.mark.parametrize("signal_after", [0.3, None])
def test_a_worker_that_is_killed_while_it_hands_over_is_named(signal_after: float | None) -> None:
    loader = loader_of(workers=1, collate=lambda samples: Torn(signal_after))
    began = time.monotonic()
    killed = r"DataLoader worker \(pid\(?s?\)? ?\d+\) .*(killed|exited unexpectedly)"
    with pytest.raises(ConnectionResetError if signal_after is None else RuntimeError) as failed:
        next(iter(loader))
    loader.close()
    assert (re.match(killed, str(failed.value)) is None) == (signal_after is None)
    assert time.monotonic() - began > (signal_after or 1)
