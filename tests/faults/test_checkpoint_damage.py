"""Damaged and malicious checkpoints: raised before loading, without running code."""

import hashlib
import io
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.system import here
from samestep.checkpoint.contents import Progress, Training
from samestep.checkpoint.manifest import MANIFEST
from samestep.checkpoint.state import MODEL, OPTIMIZER, load, load_model, pack
from samestep.checkpoint.store import STATE, CheckpointFolder, read_state
from samestep.errors import EXIT_INPUT, CheckpointError

FILES = (MODEL, OPTIMIZER, STATE, MANIFEST)
RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"


def training(seed: int = 0) -> Training:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return Training(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False))


def bytes_of(run: Training) -> dict[str, bytes]:
    return pack(run, Progress(step=0))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("two"))
    for step in (1, 2):
        folder.write(step, pack(training(step), Progress(step=step)))
    return folder.path


# --- damage -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(name=st.sampled_from(FILES), position=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["cut", "flip"]))
def test_damage_error_names_the_file_and_the_older_checkpoint_loads(
    two: Path, name: str, position: float, kind: str
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = CheckpointFolder(Path(shutil.copytree(two, Path(scratch) / "copy", symlinks=True)))
        file = folder.path / "step-000000002" / name
        data = file.read_bytes()
        at = int(position * len(data))
        file.write_bytes(data[:at] if kind == "cut" else data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        run = training(9)
        before = bytes_of(run)
        with pytest.raises(CheckpointError) as raised:
            load(folder.find("last"), run)
        assert str(file) in str(raised.value)
        assert bytes_of(run) == before
        newest = folder.newest_valid()
        assert newest is not None
        assert load(newest, run).step == 1
        assert torch.equal(run.model.weight, training(1).model.weight)


def test_an_unreadable_file_is_damage(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Any, digest: str) -> None:
        raise OSError(5, os.strerror(5))

    folder = CheckpointFolder(Path(shutil.copytree(two, tmp_path / "copy", symlinks=True)))
    monkeypatch.setattr(hashlib, "file_digest", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        load(folder.find("last"), training())
    assert folder.newest_valid() is None


# --- malicious files --------------------------------------------------------------------------------


class Payload:
    """Creates a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self._sign = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._sign),)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Payload(marker))


def saved_by_torch(marker: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": Payload(marker)}, file)
    return file.getvalue()


def write_matching_manifest(checkpoint: Path) -> None:
    """Write a manifest that matches the current files."""
    content = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != MANIFEST}
    write_manifest(checkpoint, {name: _entry(data) for name, data in content.items()})


def _entry(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def write_manifest(checkpoint: Path, files: object) -> None:
    manifest: dict[str, object] = {"format": 2, "files": files}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def load_training(checkpoint: Path) -> object:
    return load(checkpoint, training())


LOADERS: tuple[Callable[[Path], object], ...] = (
    load_training,
    lambda checkpoint: load_model(checkpoint, training().model),
    read_state,
)


@pytest.fixture
def checkpoint(two: Path, tmp_path: Path) -> Path:
    return CheckpointFolder(Path(shutil.copytree(two, tmp_path / "copy", symlinks=True))).find("last")


@pytest.mark.parametrize("make", [pickled, saved_by_torch])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("matches", [False, True], ids=["old-manifest", "matching-manifest"])
def test_a_pickle_is_never_loaded(
    checkpoint: Path, tmp_path: Path, name: str, matches: bool, make: Callable[[Path], bytes]
) -> None:
    marker = tmp_path / "it ran"
    (checkpoint / name).write_bytes(make(marker))
    if matches and name != MANIFEST:
        write_matching_manifest(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        load(checkpoint, training())
    assert raised.value.exit_code == EXIT_INPUT
    assert name in str(raised.value)
    for loader in LOADERS:
        try:
            loader(checkpoint)
        except CheckpointError:
            continue
        assert matches  # the loader does not read this file
    assert not marker.exists()
    pickle.loads(pickled(marker))
    assert marker.exists(), "the payload does not work, so the test has no meaning"


def test_other_files_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    for name in ("model.pt", "optimizer.bin", ".metadata", "__0_0.distcp", "model.safetensors.index.json", "x.py"):
        (checkpoint / name).write_bytes(pickled(marker))
        (checkpoint.parent / name).write_bytes(pickled(marker))
    assert load(checkpoint, training()).step == 2
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../model.safetensors", "../../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b"])
def test_a_manifest_cannot_name_files_outside_the_checkpoint(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "model.safetensors").write_bytes(b"x")
    content = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != MANIFEST}
    write_manifest(checkpoint, {**{key: _entry(data) for key, data in content.items()}, name: _entry(b"x")})
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(checkpoint, training())


@pytest.mark.parametrize("name", FILES)
def test_links_in_a_checkpoint_are_refused(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint, training())


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, STATE])
def test_loaded_files_must_be_in_the_manifest(checkpoint: Path, name: str) -> None:
    content = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name not in (MANIFEST, name)}
    write_manifest(checkpoint, {key: _entry(data) for key, data in content.items()})
    with pytest.raises(CheckpointError, match=f"{name} is not in the manifest"):
        load(checkpoint, training())


@pytest.mark.parametrize("files", [[], None, 3, "model", {"state.json": []}, {"state.json": {}}, {"state.json": None}])
def test_a_malformed_manifest_is_refused(checkpoint: Path, files: object) -> None:
    write_manifest(checkpoint, files)
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(checkpoint, training())


STATES = ["", "[]", "3", "null", "{}", '{"progress": 3}', "[" * 100_000, '{"progress": {}, "aliases": []}', "\xff"]


@pytest.mark.parametrize("text", STATES, ids=range(len(STATES)))
def test_a_malformed_state_is_refused(checkpoint: Path, text: str) -> None:
    assert read_state(checkpoint).progress == Progress(step=2)
    (checkpoint / STATE).write_bytes(text.encode("latin-1"))
    write_matching_manifest(checkpoint)
    for loader in (load_training, read_state):
        with pytest.raises(CheckpointError, match=STATE):
            loader(checkpoint)


@pytest.mark.parametrize("name", [MODEL, STATE])
def test_resume_refuses_malicious_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    run, marker = tmp_path / "runs" / "a", tmp_path / "it ran"
    assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=tmp_path) == 0
    checkpoint = CheckpointFolder(run / "checkpoints").find("last")
    (checkpoint / name).write_bytes(pickled(marker))
    write_matching_manifest(checkpoint)
    capsys.readouterr()
    assert here("resume", run, cwd=tmp_path) == EXIT_INPUT
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert name in output.splitlines()[0]
    assert not marker.exists()
