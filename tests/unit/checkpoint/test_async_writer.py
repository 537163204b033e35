"""Background writing: the saved state is that of the call to `save`, every failure is raised; checkpoint interval."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.checkpoint.async_writer import AsyncCheckpointWriter, CheckpointInterval, SavedCheckpoint
from samestep.checkpoint.snapshot import HostBuffers
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointWriteError, InputError


class GatedFolder(CheckpointFolder):
    """Folder with a configurable slow or full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep=9)
        self.gate = threading.Event()
        self.gate.set()
        self.is_full = False

    def write(self, step: int, files: object, *, is_best: bool = False, epoch: int | None = None) -> Path:
        assert self.gate.wait(20)
        if self.is_full:
            raise CheckpointWriteError(f"no space for step {step}")
        return super().write(step, files, is_best=is_best, epoch=epoch)  # type: ignore[arg-type]

    @contextmanager
    def slow(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


@pytest.fixture
def folder(tmp_path: Path) -> GatedFolder:
    return GatedFolder(tmp_path)


def steps(folder: CheckpointFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.steps()]


def test_save_returns_before_the_write_and_reports_the_checkpoint(folder: GatedFolder) -> None:
    checkpoints: list[SavedCheckpoint] = []
    state = bytearray(b"one")
    writer = AsyncCheckpointWriter(folder, checkpoints.append)
    with folder.slow():
        writer.save(1, lambda _: {"a": bytes(state)}, is_best=True)
        state[:] = b"two"
        writer.poll()
        assert not checkpoints
        assert not folder.steps()
    writer.wait()
    assert [(saved.step, saved.is_best) for saved in checkpoints] == [(1, True)]
    assert checkpoints[0].seconds > 0
    assert (folder.find("best") / "a").read_bytes() == b"one"
    writer.wait()
    assert len(checkpoints) == 1


def test_save_waits_for_the_previous_one(folder: GatedFolder) -> None:
    checkpoints: list[SavedCheckpoint] = []
    heartbeats: list[None] = []
    writer = AsyncCheckpointWriter(folder, checkpoints.append, lambda: heartbeats.append(None))
    folder.gate.clear()
    writer.save(1, lambda _: {"a": b"1"})
    timer = threading.Timer(0.2, folder.gate.set)
    timer.start()

    def second(_: HostBuffers) -> dict[str, bytes]:
        assert steps(folder) == [1], "two copies of the state at a time"
        return {"a": b"2"}

    writer.save(2, second)
    assert [saved.step for saved in checkpoints] == [1]
    assert heartbeats
    writer.wait()
    timer.join()
    assert steps(folder) == [1, 2]


@pytest.mark.parametrize("call", ["poll", "wait", "save", "leave"])
def test_a_failure_is_raised_once_by_the_next_call(folder: GatedFolder, call: str) -> None:
    writer = AsyncCheckpointWriter(folder, lambda saved: None)
    folder.is_full = True
    writer.save(1, lambda _: {"a": b"1"})
    assert writer._thread is not None
    writer._thread.join()
    with pytest.raises(CheckpointWriteError, match="no space for step 1"):
        if call == "poll":
            writer.poll()
        elif call == "wait":
            writer.wait()
        elif call == "save":
            writer.save(2, lambda _: pytest.fail("the state was copied needlessly"))
        else:
            with writer:
                pass
    writer.poll()
    writer.wait()


def test_end_of_block_waits(folder: GatedFolder) -> None:
    with AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(1, lambda _: {"a": b"1"})
    assert steps(folder) == [1]


def test_error_in_the_block_waits_and_reports_both_errors(folder: GatedFolder) -> None:
    with pytest.raises(InputError) as raised, AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(1, lambda _: {"a": b"1"})
        raise InputError("no such color")
    assert steps(folder) == [1]
    assert not hasattr(raised.value, "__notes__")

    folder.is_full = True
    with pytest.raises(InputError) as raised, AsyncCheckpointWriter(folder, lambda saved: None) as writer:
        writer.save(2, lambda _: {"a": b"1"})
        raise InputError("no such color")
    assert raised.value.__notes__ == ["no space for step 2 [E_CHECKPOINT_WRITE]"]


def test_a_failed_copy_of_the_state_starts_no_write(folder: GatedFolder) -> None:
    writer = AsyncCheckpointWriter(folder, lambda saved: None)
    with pytest.raises(MemoryError):
        writer.save(1, no_memory)
    writer.wait()
    assert not folder.steps()


def no_memory(_: HostBuffers) -> dict[str, bytes]:
    raise MemoryError


# --- checkpoint interval: a kill loses at most the given amount of work ---


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_bound_no_save_is_due() -> None:
    assert not CheckpointInterval(None).is_due(1e9)


def test_save_is_due_if_the_next_opportunity_is_too_late() -> None:
    interval = CheckpointInterval(10.0, clock := Clock())
    clock.now += 6
    assert not interval.is_due(3.9)
    assert interval.is_due(4.0)
    interval.begin_save()
    assert not interval.is_due(9.9)
    interval.end_save(2.0)
    assert not interval.is_due(7.9)
    assert interval.is_due(8.0)


def test_the_longest_of_the_last_saves_counts() -> None:
    interval = CheckpointInterval(10.0, Clock())
    for seconds in (5.0, 1.0):
        interval.end_save(seconds)
    assert interval.is_due(5.0)
    for _ in range(8):
        interval.end_save(1.0)
    assert not interval.is_due(8.9)


def test_a_save_longer_than_the_bound_is_reported_once() -> None:
    interval = CheckpointInterval(1.0)
    assert [interval.end_save(seconds) for seconds in (0.9, 1.1, 0.5, 1.2)] == [False, True, False, False]
    assert not CheckpointInterval(None).end_save(1e9)


@pytest.mark.parametrize("seed", range(5))
def test_lost_work_stays_below_the_bound(seed: int) -> None:
    """Steps take up to 0.5 s, background saves 1 to 2 s; the interval is 10 s."""
    draw = random.Random(seed)
    interval = CheckpointInterval(10.0, clock := Clock())
    interval.end_save(2.0)  # duration of saves
    saved, writing, step, worst = clock.now, None, 0.5, 0.0
    for _ in range(2000):
        is_due = interval.is_due(2 * step)
        step = draw.uniform(0.1, 0.5)
        clock.now += step
        if writing is not None and writing[0] <= clock.now:
            worst = max(worst, writing[0] - saved)
            saved, writing = writing[1], None
            interval.end_save(2.0)
        if is_due and writing is None:
            writing = (clock.now + draw.uniform(1.0, 2.0), clock.now)
            interval.begin_save()
    assert 9.0 < worst <= 10.0 + 0.5  # the last step may take longer than the one before it
