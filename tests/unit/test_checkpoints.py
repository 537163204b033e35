"""Checkpoints in a loop of one's own: beside training or not, one process at a time."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from batches import random_data
from models import Normed, seeded
from samestep.checkpoint.store import CheckpointFolder
from samestep.engine.step import Engine
from samestep.errors import CheckpointWriteError, InputError

World = samestep.World
Loop = tuple[Engine, samestep.loader]


def loop(world: World, seed: int = 0) -> Loop:
    model = seeded(seed, Normed)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), samestep.cross_entropy, world=world)
    return engine, samestep.loader(TensorDataset(*random_data(64)), batch_size=8, shards=4, shuffle=True, world=world)


def weights(engine: Engine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in engine.model.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trained(world: World) -> list[torch.Tensor]:
    engine, batches = loop(world)
    for batch in batches:
        engine.step(batch)
    return weights(engine)


@pytest.mark.parametrize("background", [False, True])
def test_a_loop_goes_on_as_if_nothing_had_happened(alone: World, tmp_path: Path, background: bool) -> None:
    engine, batches = loop(alone)
    with samestep.Checkpoints(tmp_path, engine, batches, background=background) as checkpoints:
        assert not checkpoints.resume()
        for batch in batches:
            if engine.step(batch).step % 2 == 0:
                checkpoints.save()
            if engine.steps == 5:
                break
    assert [path.name for path in CheckpointFolder(tmp_path).steps()] == ["step-000000002", "step-000000004"]

    engine, batches = loop(alone, seed=1)
    checkpoints = samestep.Checkpoints(tmp_path, engine, batches)
    assert checkpoints.resume()
    assert engine.steps == 4
    for batch in batches:
        engine.step(batch)
    assert equal(weights(engine), trained(alone))


def test_without_background_a_save_is_there_when_it_returns(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    checkpoints = samestep.Checkpoints(tmp_path, engine, batches)
    checkpoints.save()
    assert CheckpointFolder(tmp_path).newest_whole() is not None


def test_in_the_background_somebody_must_wait_in_the_end(alone: World, tmp_path: Path) -> None:
    checkpoints = samestep.Checkpoints(tmp_path, *loop(alone), background=True)
    with pytest.raises(InputError, match="without a with block"):
        checkpoints.save()


def test_what_is_saved_in_the_background_is_what_was_there(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    with samestep.Checkpoints(tmp_path, engine, batches, background=True, keep=99) as checkpoints:
        seen = []
        for batch in batches:
            engine.step(batch)
            checkpoints.save()
            seen.append(weights(engine))
    for step, before in enumerate(seen, 1):
        other, more = loop(alone, seed=1)
        one, found = tmp_path / f"one-{step}", CheckpointFolder(tmp_path).find(str(step))
        shutil.copytree(found, one / found.name)
        assert samestep.Checkpoints(one, other, more).resume()
        assert equal(weights(other), before)


@contextmanager
def broken(folder: Path) -> Iterator[None]:
    """The folder is a file."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.touch()
    yield
    folder.unlink()
    away.rename(folder)


def test_a_save_that_fails_is_raised_at_once(alone: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    engine, batches = loop(alone)
    checkpoints = samestep.Checkpoints(folder, engine, batches)
    checkpoints.save()
    with broken(folder), pytest.raises(CheckpointWriteError, match="step 0"):
        checkpoints.save()


def test_the_end_of_the_block_tells_of_a_save_that_failed(alone: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    engine, batches = loop(alone)
    checkpoints = samestep.Checkpoints(folder, engine, batches, background=True)
    with broken(folder), pytest.raises(CheckpointWriteError, match="step 0"), checkpoints:
        checkpoints.save()
    with broken(folder), pytest.raises(CheckpointWriteError, match="step 0"), checkpoints:
        checkpoints.save()
        checkpoints.save()
        pytest.fail("the failure of the first save got lost")


SECOND = """
import sys
from pathlib import Path
import samestep.checkpoint.lock as lock
from samestep.errors import InputError
try:
    lock.FolderLock(Path(sys.argv[1]), patience=0)
except InputError as error:
    print(error.value)
"""


def second_process(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", SECOND, str(folder)], text=True, capture_output=True, check=True)
    return done.stdout


def test_another_process_is_kept_out_and_another_object_is_not(alone: World, tmp_path: Path) -> None:
    with samestep.Checkpoints(tmp_path, *loop(alone)) as checkpoints:
        assert "is in use by process" in second_process(tmp_path)
        again = samestep.Checkpoints(tmp_path, *loop(alone))  # as a notebook does whose cell is run again
        again.save()
        checkpoints.save()
    assert "is in use by process" in second_process(tmp_path)
    del again
    assert second_process(tmp_path) == ""


@pytest.mark.parametrize("keep", [0, -3])
def test_at_least_one_stays(alone: World, tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError, match="at least 1 checkpoint stays"):
        samestep.Checkpoints(tmp_path, *loop(alone), keep=keep)
