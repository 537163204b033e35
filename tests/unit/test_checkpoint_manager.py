"""Checkpoint manager in a custom loop: in the background or not, one process at a time."""

import errno
import hashlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from helpers.batches import random_data
from helpers.disk_faults import fail_with, intercepting
from helpers.models import Normed, seeded
from helpers.system import tree
from samestep.checkpoint.store import CheckpointFolder
from samestep.data.loader import Loader
from samestep.engine.engine import Engine
from samestep.errors import CheckpointError, CheckpointWriteError, InputError
from samestep.launcher.job import process_state
from samestep.microbatches import Cursor

World = samestep.World
Loop = tuple[Engine, Loader]


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


class Seen:
    """State of a loop with keys that are no text."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def state_dict(self) -> dict[int, int]:
        return self.counts

    def load_state_dict(self, state: dict[int, int]) -> None:
        self.counts = state


def test_several_engines_are_in_one_checkpoint(alone: World, tmp_path: Path) -> None:
    (one, batches), (other, more) = loop(alone), loop(alone, seed=1)
    seen, generator, progress = Seen(), torch.Generator().manual_seed(3), {"best": 0.5, 3: ()}
    state = {"seen": seen, "generator": generator, "progress": progress}
    checkpoints = samestep.CheckpointManager(
        tmp_path, {"one": one, "other": other}, {"a": batches, "b": more}, state=state
    )
    for batch in batches:
        one.step(batch)
        other.step(batch)
        other.step(batch)
        if one.steps == 3:
            break
    seen.counts[7] = 1
    torch.rand(2, generator=generator)
    checkpoints.save()
    path = CheckpointFolder(tmp_path).find("last")
    assert path.name == "step-000000006"
    assert {file.name for file in path.iterdir()} == {"manifest.json", "one.others.safetensors"} | {
        f"{name}.{file}"
        for name in ("one", "other")
        for file in ("model.safetensors", "optimizer.safetensors", "state.json")
    }
    before, position, drawn = [*weights(one), *weights(other)], batches.cursor, torch.rand(2, generator=generator)
    for batch in more:
        one.step(batch)
        other.step(batch)
    seen.counts[8] = 2
    progress.clear()
    assert checkpoints.resume()
    assert equal([*weights(one), *weights(other)], before)
    assert (one.steps, other.steps, batches.cursor, more.cursor) == (3, 6, position, Cursor())
    assert seen.counts == {7: 1}
    assert progress == {"best": 0.5, 3: ()}
    assert torch.equal(torch.rand(2, generator=generator), drawn)


def test_files_of_several_engines_are_hashed_once(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, batches), (other, _) = loop(alone), loop(alone, seed=1)
    checkpoints = samestep.CheckpointManager(tmp_path, {"one": one, "other": other}, batches)
    checkpoints.save()
    hashed: list[str] = []
    digest = hashlib.file_digest

    def counted(file: BinaryIO, name: str) -> "hashlib._Hash":
        hashed.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert checkpoints.resume()
    assert sorted(hashed) == sorted(
        f"{name}.{file}"
        for name in ("one", "other")
        for file in ("model.safetensors", "optimizer.safetensors", "state.json")
    )


def test_a_resumption_of_another_loop_lists_the_differences_and_changes_nothing(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    samestep.CheckpointManager(tmp_path, engine, batches).save()
    other, _ = loop(alone, seed=1)
    other.config = samestep.StepConfig(seed=4)
    data = TensorDataset(*random_data(60))
    checkpoints = samestep.CheckpointManager(
        tmp_path, other, samestep.loader(data, batch_size=12, microbatches=4, world=alone)
    )
    before = weights(other)
    with pytest.raises(InputError) as raised:
        checkpoints.resume()
    assert raised.value.code == "E_RESUME_CHANGED"
    for text in (
        "engine: seed is 4, and was 0",
        "loader: batch_size is 12, and was 8",
        "shuffle is False, and was True",
    ):
        assert text in raised.value.value
    assert equal(weights(other), before)
    assert checkpoints.resume(accept_changes=True)
    assert equal(weights(other), weights(engine))


def test_objects_can_be_added_to_a_resumed_loop(alone: World, tmp_path: Path) -> None:
    engine, batches = loop(alone)
    samestep.CheckpointManager(tmp_path, engine, batches, state={"seen": Seen()}).save()
    added = {"new": 1}
    checkpoints = samestep.CheckpointManager(tmp_path, engine, batches, state={"seen": Seen(), "added": added})
    with pytest.raises(CheckpointError, match="added") as raised:
        checkpoints.resume()
    assert raised.value.code == "E_RESUME_CHANGED"
    assert checkpoints.resume(accept_changes=True)
    assert added == {"new": 1}
    without = samestep.CheckpointManager(tmp_path, engine, batches)
    with pytest.raises(CheckpointError, match="seen"):
        without.resume(accept_changes=True)


@pytest.mark.parametrize("names", [[], ["a.b"], ["../a"], [""]])
def test_names_that_are_no_file_names_are_refused(alone: World, tmp_path: Path, names: list[str]) -> None:
    engine, batches = loop(alone)
    with pytest.raises(InputError) as raised:
        samestep.CheckpointManager(tmp_path, dict.fromkeys(names, engine), batches)
    assert raised.value.code == "E_CHECKPOINT_WRITE"


def test_a_resumed_engine_draws_the_numbers_of_the_saved_one(alone: World, tmp_path: Path) -> None:
    (first, batches), (second, more) = loop(alone), loop(alone)
    batch = next(iter(batches))
    first.step(batch)
    second.step(batch)
    assert (first.number, second.number) == (0, 1)
    samestep.CheckpointManager(tmp_path, second, more).save()
    resumed, position = loop(alone)
    samestep.CheckpointManager(tmp_path, resumed, position).resume()
    assert resumed.number == 1
    later, _ = loop(alone)
    later.step(batch)
    assert later.number == 0


def test_a_trial_keeps_the_checkpoints_of_each_folder_below_its_own(
    alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batches = loop(alone)
    samestep.CheckpointManager(tmp_path / "one", engine, batches).save()
    before, root = tree(tmp_path), tmp_path / "trial"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process_state, "checkpoint_root", root)
    one, other = (samestep.CheckpointManager(name, *loop(alone)) for name in ("one", "other"))
    assert not one.resume()
    one.save()
    assert samestep.CheckpointManager(tmp_path / "one", *loop(alone)).resume()
    assert not other.resume()
    inside = root / "chosen by the command"
    samestep.CheckpointManager(inside, *loop(alone)).save()
    assert CheckpointFolder(inside).newest_valid() is not None
    assert {path: value for path, value in tree(tmp_path).items() if not path.startswith("trial")} == before


@pytest.mark.parametrize("changes_state", [True, False])
def test_epochs_saves_state_that_changed_after_the_last_save(alone: World, tmp_path: Path, changes_state: bool) -> None:
    engine, batches = loop(alone)
    state: dict[str, int] = {}
    checkpoints = samestep.CheckpointManager(tmp_path, engine, batches, state={"state": state})
    written = []
    for epoch in checkpoints.epochs(2):
        for batch in batches:
            engine.step(batch)
        checkpoints.save()
        written.append((tmp_path / "last" / "state.json").stat().st_ino)
        if changes_state:
            state[f"loss of epoch {epoch}"] = epoch
    assert ((tmp_path / "last" / "state.json").stat().st_ino != written[-1]) == changes_state
    restored: dict[str, int] = {}
    assert samestep.CheckpointManager(tmp_path, *loop(alone), state={"state": restored}).resume()
    assert restored == state


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_epochs_saves_a_learning_rate_that_changed_after_the_last_save(
    alone: World, tmp_path: Path, kind: Callable[[float], Any]
) -> None:
    (engine, batches), (resumed, others) = loop(alone), loop(alone)
    for owner in (engine, resumed):
        owner.optimizer.param_groups[0]["lr"] = kind(0.5)
    checkpoints = samestep.CheckpointManager(tmp_path, engine, batches)
    for _ in checkpoints.epochs(1):
        for batch in batches:
            engine.step(batch)
        checkpoints.save()
        engine.optimizer.param_groups[0]["lr"] *= 0.5
    assert samestep.CheckpointManager(tmp_path, resumed, others).resume()
    assert resumed.optimizer.param_groups[0]["lr"] == 0.25
