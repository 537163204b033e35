"""Other files in the place of those of a run, and sizes that lie: one error, or the file is skipped, within 2 s."""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.surroundings import RecordFault, require_bounded
from helpers.system import here
from samestep.checkpoint.manifest import verify
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import InputError
from samestep.loggers.logger import JsonlLogger
from samestep.recipes.models import load_all
from samestep.recipes.recipe_files import load_recipe, read_dataset_info, write_recipe

SECONDS = 2.0  # of CPU time
SPARSE_BYTES = 10 << 30
FILES = ("recipe.yaml", "environment.json", "events.jsonl", "ranks/rank-0.jsonl", ".lock")


def _link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": _link_to_zeros,
    "a folder": Path.mkdir,
    "a sparse file of 10 GB": _make_sparse,
}


def replace_by(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run that has logged one step."""
    folder = tmp_path / "runs/a"
    (folder / "ranks").mkdir(parents=True)
    write_recipe(load_recipe("digits"), folder / "recipe.yaml")
    (folder / "events.jsonl").write_text('{"time": 1, "event": "step", "step": 1}\n', encoding="utf-8")
    for name in ("environment.json", "ranks/rank-0.jsonl", ".lock"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_viewers_end(
    name: str, kind: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    replace_by(kind, run / name)
    codes = []
    for command in (("top", run, "--once"), ("report", run, "--out", tmp_path / "report.html")):
        began = time.process_time()
        code = here(*command, cwd=tmp_path)
        assert time.process_time() - began < SECONDS
        _, report = capfd.readouterr()
        assert code in (0, 2), report
        assert report.count("error: ") == (1 if code else 0)
        require_bounded(report)
        codes.append(code)
    if name != ".lock" and (name, kind) != ("ranks/rank-0.jsonl", "a sparse file of 10 GB"):
        assert 2 in codes, report
    record_fault(f"{kind} in the place of {name}, `top` and `report`", "exit code 0 or 2 within 2 s")


@pytest.mark.parametrize("kind", KINDS)
def test_commands_of_a_run_end(kind: str, run: Path, tmp_path: Path, record_fault: RecordFault) -> None:
    """`resume` and `eval` read these files before anything is started."""
    CheckpointFolder(run / "checkpoints").write(1, {"model.safetensors": b"1", "state.json": b"{}"})
    checkpoint = run / "checkpoints/step-000000001"
    began = time.process_time()
    for name in ("manifest.json", "state.json", "model.safetensors"):
        copy = shutil.copytree(checkpoint, tmp_path / name)
        replace_by(kind, copy / name)
        with pytest.raises(InputError):
            verify(copy)
    replace_by(kind, run / "data.json")
    with pytest.raises(InputError):
        read_dataset_info(run)
    replace_by(kind, run / "events.jsonl")
    if kind != "a sparse file of 10 GB":  # whose end an event is appended to
        with pytest.raises(OSError, match=r"regular file|No such device|Is a directory"):
            JsonlLogger(run / "events.jsonl").log_event({"event": "note"})
    replace_by(kind, run / "recipe.yaml")
    for command in (("eval", run), ("resume", run)):
        assert here(*command, cwd=tmp_path) == 2
    assert time.process_time() - began < 4 * SECONDS
    record_fault(f"{kind} in the place of a checkpoint's files, recipe.yaml and data.json", "exit code 2 within 2 s")


# --- sizes that lie ---


def _safetensors(path: Path) -> None:
    path.with_suffix(".safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def _tensor_beyond_the_end(path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    path.with_suffix(".safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def _read_weights(folder: Path) -> None:
    from torch import nn

    load_all(nn.Linear(1, 1), folder / "a.safetensors")


LIES: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "a safetensors header of 2^60 bytes": (_safetensors, _read_weights),
    "a tensor that ends after its file": (_tensor_beyond_the_end, _read_weights),
}


@pytest.mark.parametrize("lie", LIES)
def test_sizes_that_lie(lie: str, tmp_path: Path, record_fault: RecordFault) -> None:
    write, read = LIES[lie]
    write(tmp_path / "a")
    began = time.process_time()
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert caught.value.code == "E_UNREADABLE"
    assert time.process_time() - began < SECONDS
    require_bounded(str(caught.value))
    record_fault(lie, f"`{caught.value.code}` within 2 s")
