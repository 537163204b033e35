"""What is saved beside training is what was there when it was asked for, and no failure gets lost."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.checkpoint.background import Saved, Saver
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointWriteError, InputError


class Gated(CheckpointFolder):
    """A folder whose disk is as slow or as full as a test wants it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep=9)
        self.gate = threading.Event()
        self.gate.set()
        self.is_full = False

    def write(self, step: int, files: object, *, is_best: bool = False) -> Path:
        assert self.gate.wait(20)
        if self.is_full:
            raise CheckpointWriteError(f"no room for step {step}")
        return super().write(step, files, is_best=is_best)  # type: ignore[arg-type]

    @contextmanager
    def slow(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


@pytest.fixture
def folder(tmp_path: Path) -> Gated:
    return Gated(tmp_path)


def steps(folder: CheckpointFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.steps()]


def test_saving_goes_on_beside_training_and_is_told_when_it_is_done(folder: Gated) -> None:
    told: list[Saved] = []
    state = bytearray(b"one")
    saver = Saver(folder, told.append)
    with folder.slow():
        saver.save(1, lambda: {"a": bytes(state)}, is_best=True)
        state[:] = b"two"
        saver.look()
        assert not told
        assert not folder.steps()
    saver.wait()
    assert [(saved.step, saved.is_best) for saved in told] == [(1, True)]
    assert told[0].seconds > 0
    assert (folder.find("best") / "a").read_bytes() == b"one"
    saver.wait()
    assert len(told) == 1


def test_the_next_save_waits_for_the_one_before(folder: Gated) -> None:
    told: list[Saved] = []
    ticks: list[None] = []
    saver = Saver(folder, told.append, lambda: ticks.append(None))
    folder.gate.clear()
    saver.save(1, lambda: {"a": b"1"})
    timer = threading.Timer(0.2, folder.gate.set)
    timer.start()

    def second() -> dict[str, bytes]:
        assert steps(folder) == [1], "two copies of the state at a time"
        return {"a": b"2"}

    saver.save(2, second)
    assert [saved.step for saved in told] == [1]
    assert ticks
    saver.wait()
    timer.join()
    assert steps(folder) == [1, 2]


@pytest.mark.parametrize("call", ["look", "wait", "save", "leave"])
def test_a_failure_is_raised_by_the_next_call_and_once(folder: Gated, call: str) -> None:
    saver = Saver(folder, lambda saved: None)
    folder.is_full = True
    saver.save(1, lambda: {"a": b"1"})
    assert saver._writing is not None
    saver._writing.join()
    with pytest.raises(CheckpointWriteError, match="no room for step 1"):
        if call == "look":
            saver.look()
        elif call == "wait":
            saver.wait()
        elif call == "save":
            saver.save(2, lambda: pytest.fail("a copy that nobody wants"))
        else:
            with saver:
                pass
    saver.look()
    saver.wait()


def test_leaving_the_block_waits(folder: Gated) -> None:
    with Saver(folder, lambda saved: None) as saver:
        saver.save(1, lambda: {"a": b"1"})
    assert steps(folder) == [1]


def test_leaving_by_an_error_waits_too_and_tells_both(folder: Gated) -> None:
    with pytest.raises(InputError) as raised, Saver(folder, lambda saved: None) as saver:
        saver.save(1, lambda: {"a": b"1"})
        raise InputError("no such colour")
    assert steps(folder) == [1]
    assert str(raised.value) == "no such colour"

    folder.is_full = True
    with pytest.raises(InputError) as raised, Saver(folder, lambda saved: None) as saver:
        saver.save(2, lambda: {"a": b"1"})
        raise InputError("no such colour")
    assert str(raised.value) == "no such colour\n  also: no room for step 2"


def test_a_snapshot_that_fails_starts_nothing(folder: Gated) -> None:
    saver = Saver(folder, lambda saved: None)
    with pytest.raises(MemoryError):
        saver.save(1, no_memory)
    saver.wait()
    assert not folder.steps()


def no_memory() -> dict[str, bytes]:
    raise MemoryError
