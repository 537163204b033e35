"""Checkpoint manager in a custom loop: in the background or not, one process at a time."""

import errno
import math
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
from helpers.batches import random_data
from helpers.disk_faults import fail_with, intercepting
from helpers.models import Normed, seeded
from samestep.checkpoint.store import CheckpointFolder
from samestep.engine.engine import Engine
from samestep.errors import CheckpointWriteError, InputError

World = samestep.World
Loop = tuple[Engine, samestep.loader]


def loop(world: World, seed: int = 0) -> Loop:
    model = seeded(seed, Normed)
    engine = Engine(model, torch.optim.AdamW(model.parameters()), samestep.cross_entropy, world=world)
    return engine, samestep.loader(
        TensorDataset(*random_data(64)), batch_size=8, microbatches=4, shuffle=True, world=world
    )


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
def test_resumed_loop_has_the_same_bits(alone: World, tmp_path: Path, background: bool) -> None:
    engine, batches = loop(alone)
    with samestep.CheckpointManager(tmp_path, engine, batches, background=background) as checkpoints:
        assert not checkpoints.resume()
        for batch in batches:
            if engine.step(batch).step % 2 == 0:
                checkpoints.save()
            if engine.steps == 5:
                break
    assert [path.name for path in CheckpointFolder(tmp_path).steps()] == ["step-000000002", "step-000000004"]

    engine, batches = loop(alone, seed=1)
    checkpoints = samestep.CheckpointManager(tmp_path, engine, batches)
    assert checkpoints.resume()
    assert engine.steps == 4
    for batch in batches:
        engine.step(batch)
    assert equal(weights(engine), trained(alone))


def test_save_without_background_is_complete_on_return(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    checkpoints = samestep.CheckpointManager(tmp_path, engine, batches)
    checkpoints.save()
    assert CheckpointFolder(tmp_path).newest_valid() is not None


def test_background_without_a_with_block_raises(alone: World, tmp_path: Path) -> None:
    checkpoints = samestep.CheckpointManager(tmp_path, *loop(alone), background=True)
    with pytest.raises(InputError, match="without a with block"):
        checkpoints.save()


def test_background_saves_the_state_of_the_call(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    with samestep.CheckpointManager(tmp_path, engine, batches, background=True, keep=99) as checkpoints:
        saved = []
        for batch in batches:
            engine.step(batch)
            checkpoints.save()
            saved.append(weights(engine))
    for step, before in enumerate(saved, 1):
        other, more = loop(alone, seed=1)
        copy, checkpoint = tmp_path / f"copy-{step}", CheckpointFolder(tmp_path).find(str(step))
        shutil.copytree(checkpoint, copy / checkpoint.name)
        assert samestep.CheckpointManager(copy, other, more).resume()
        assert equal(weights(other), before)


@contextmanager
def broken() -> Iterator[None]:
    """Let every change of a disk fail."""
    fail = fail_with(errno.ENOSPC, removing=False)
    with pytest.MonkeyPatch.context() as patch, intercepting(patch, 0, math.inf, fail):
        yield


def test_failed_save_raises(alone: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    engine, batches = loop(alone)
    checkpoints = samestep.CheckpointManager(folder, engine, batches)
    checkpoints.save()
    with broken(), pytest.raises(CheckpointWriteError, match="step 0"):
        checkpoints.save()


def test_end_of_block_raises_a_failed_save(alone: World, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    engine, batches = loop(alone)
    checkpoints = samestep.CheckpointManager(folder, engine, batches, background=True)
    with broken(), pytest.raises(CheckpointWriteError, match="step 0"), checkpoints:
        checkpoints.save()
    with broken(), pytest.raises(CheckpointWriteError, match="step 0"), checkpoints:
        checkpoints.save()
        checkpoints.save()
        pytest.fail("the failure of the first save was not raised")


SECOND = """
import sys
from pathlib import Path
from samestep.checkpoint.lock import FolderLock
from samestep.errors import InputError
try:
    FolderLock(Path(sys.argv[1]), timeout=0)
except InputError as error:
    print(error.value)
"""


def second_process(folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", SECOND, str(folder)], text=True, capture_output=True, check=True)
    return done.stdout


def test_another_process_is_refused_and_another_object_is_not(alone: World, tmp_path: Path) -> None:
    with samestep.CheckpointManager(tmp_path, *loop(alone)) as checkpoints:
        assert "is in use by process" in second_process(tmp_path)
        again = samestep.CheckpointManager(tmp_path, *loop(alone))  # as in a notebook cell that runs again
        again.save()
        checkpoints.save()
    assert "is in use by process" in second_process(tmp_path)
    del again
    assert second_process(tmp_path) == ""


@pytest.mark.parametrize("keep", [0, -3])
def test_keep_below_one_raises(alone: World, tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError, match=f"keep is {keep}"):
        samestep.CheckpointManager(tmp_path, *loop(alone), keep=keep)
