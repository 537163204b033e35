"""Background writing: the saved state is that of the call to `save`, every failure is raised."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.checkpoint.store import CheckpointFolder
from samestep.checkpoint.writer import AsyncCheckpointWriter, HostBuffers, SavedCheckpoint
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
    timer = threading.Timer(1, folder.gate.set)
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
