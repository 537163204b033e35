"""Checkpoint folder: complete or absent checkpoints, pruning, lookup and verification."""

import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import launch
from samestep.checkpoint.manifest import MANIFEST, verify
from samestep.checkpoint.store import CheckpointFolder, read_state
from samestep.errors import CheckpointError, CheckpointWriteError, InputError
from samestep.launcher.launch import RankError
from samestep.session import start

FILES = {"model.safetensors": bytes(range(256)) * 3, "state.json": b'{"step": 7}', "empty": b""}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def steps(folder: CheckpointFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.steps()]


def write_together(path: Path) -> None:
    """Write the same checkpoint on every rank at the same time, repeatedly."""
    with start(device="cpu") as world:
        for attempt in range(5):
            world.barrier()
            CheckpointFolder(path / str(attempt)).write(5, FILES)


def exceed_file_size_limit(path: Path, step: int) -> None:
    """Write a checkpoint and exceed the file size limit, which kills the process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    CheckpointFolder(path).write(step, FILES)


# --- writing ----------------------------------------------------------------------------------------------


def test_write_creates_a_valid_checkpoint(folder: CheckpointFolder) -> None:
    path = folder.write(7, FILES)
    assert path.name == "step-000000007"
    verify(path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST} == FILES
    assert names(folder) == ["last", "step-000000007"]


def test_the_manifest_has_hash_and_length_of_every_file(folder: CheckpointFolder) -> None:
    manifest = json.loads((folder.write(1, FILES) / MANIFEST).read_bytes())
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {n: len(d) for n, d in FILES.items()}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())


def test_equal_contents_are_not_written_again(folder: CheckpointFolder) -> None:
    path = folder.write(1, {"a": b"first"})
    before = [(file, file.stat().st_ino) for file in sorted(path.iterdir())]
    assert folder.write(1, {"a": b"first"}) == path
    assert [(file, file.stat().st_ino) for file in sorted(path.iterdir())] == before
    assert names(folder) == ["last", "step-000000001"]


def test_other_contents_of_the_same_step_replace_the_checkpoint(folder: CheckpointFolder) -> None:
    path = folder.write(1, {"a": b"before an evaluation", "b": b""})
    assert folder.write(1, {"a": b"after it"}) == path
    verify(path)
    assert (path / "a").read_bytes() == b"after it"
    assert names(folder) == ["last", "step-000000001"]


def test_checkpoint_renamed_for_replacement_counts(folder: CheckpointFolder) -> None:
    folder.write(2, {"a": b"old"}, is_best=True)
    replaced = folder.path / ".replaced-step-000000002"
    (folder.path / "step-000000002").rename(replaced)
    folder.clean()
    assert [folder.find(which) for which in ("last", "best", "2")] == [replaced] * 3
    assert folder.newest_valid() == replaced
    folder.write(3, {"a": b"new"})
    assert names(folder) == ["best", "last", "step-000000002", "step-000000003"]


def test_clean_removes_a_replaced_checkpoint(folder: CheckpointFolder) -> None:
    path = folder.write(2, {"a": b"new"})
    shutil.copytree(path, folder.path / ".replaced-step-000000002")
    assert folder.steps() == [path]
    folder.clean()
    assert names(folder) == ["last", "step-000000002"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_raises(tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError, match=f"keep is {keep}"):
        CheckpointFolder(tmp_path, keep)


def test_a_failed_write_leaves_no_checkpoint(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    with pytest.raises(CheckpointWriteError, match=r"step 2 cannot be written .*: No such file"):
        folder.write(2, {"a": b"1", "no-such-folder/b": b"2"})
    assert names(folder) == ["last", "step-000000001"]
    assert steps(folder) == [1]
    assert folder.find("last").name == "step-000000001"


def test_kill_during_a_write_preserves_earlier_checkpoints(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    with pytest.raises(RankError, match="killed by SIGXFSZ"):
        launch(exceed_file_size_limit, folder.path, 2, processes=1)
    assert steps(folder) == [1]
    assert any(name.startswith(".writing-") for name in names(folder))
    folder.clean()
    assert names(folder) == ["last", "step-000000001"]
    verify(folder.write(2, FILES))


def test_clean_removes_all_leftovers(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    (folder.path / ".writing-step-000000002-77").mkdir()
    (folder.path / ".writing-step-000000002-77" / "model").write_bytes(b"half")
    (folder.path / ".writing-removed-step-000000000").mkdir()
    (folder.path / ".last-77").symlink_to("step-000000001")
    (folder.path / ".epoch-3-77-0a1b2c3d").symlink_to("step-000000001")
    (folder.path / ".trial-0a1b2c3d").mkdir()
    folder.clean()
    assert names(folder) == ["last", "step-000000001"]


def test_clean_leaves_other_hidden_files(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    others = [".best-model", ".clang-format", ".last-run.txt", ".my-folder", ".pre-commit-config.yaml", ".step-1"]
    for name in others:
        (folder.path / name).mkdir()
    folder.clean()
    assert names(folder) == sorted([*others, "last", "step-000000001"])


def test_concurrent_writers_of_the_same_checkpoint(tmp_path: Path) -> None:
    launch(write_together, tmp_path, processes=4)
    for attempt in range(5):
        path = tmp_path / str(attempt)
        assert sorted(entry.name for entry in path.iterdir()) == ["last", "step-000000005"]
        verify(path / "last")


# --- pruning ----------------------------------------------------------------------------------------------


def test_steps_are_in_order_of_number_not_of_name(folder: CheckpointFolder) -> None:
    folder.keep = 9
    for step in (999_999_999, 5, 40, 3):
        folder.write(step, FILES)
    assert steps(folder) == [3, 5, 40, 999_999_999]


def test_higher_steps_before_a_return_do_not_count(folder: CheckpointFolder) -> None:
    for step in (100, 200, 300, 210, 220):
        folder.write(step, FILES)
    assert steps(folder) == [210, 220, 300]


@settings(max_examples=15)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3))
def test_newest_and_best_are_kept_in_any_sequence(best: list[bool], keep: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = CheckpointFolder(Path(name), keep)
        for step, is_best in enumerate(best):
            folder.write(step, {"a": b"1"}, is_best=is_best)
        expected = set(range(len(best))[-keep:]) | ({max(s for s, b in enumerate(best) if b)} if any(best) else set())
        assert steps(folder) == sorted(expected)
        for path in folder.steps():
            verify(path)


def test_ends_of_epochs_have_names_while_their_checkpoints_exist(folder: CheckpointFolder) -> None:
    for epoch in range(1, 5):
        folder.write(10 * epoch - 5, FILES)
        folder.write(10 * epoch, FILES, is_best=epoch == 1, epoch=epoch)
    assert names(folder) == ["best", "epoch-1", "epoch-4", "last", "step-000000010", "step-000000035", "step-000000040"]
    assert [folder.find(f"epoch-{epoch}").name for epoch in (1, 4)] == ["step-000000010", "step-000000040"]
    with pytest.raises(CheckpointError, match="no checkpoint 'epoch-2'"):
        folder.find("epoch-2")


# --- finding ----------------------------------------------------------------------------------------------


def test_find_last_best_and_steps(folder: CheckpointFolder) -> None:
    for step in (10, 20):
        folder.write(step, FILES, is_best=step == 10)
    assert [folder.find(which).name for which in ("last", "best", "10", "20")] == [
        "step-000000020",
        "step-000000010",
        "step-000000010",
        "step-000000020",
    ]


@pytest.mark.parametrize("target", [None, "step-000000030"])
def test_without_a_valid_link_last_is_the_highest_step(folder: CheckpointFolder, target: str | None) -> None:
    for step in (10, 20):
        folder.write(step, FILES)
    (folder.path / "last").unlink()
    if target is not None:
        (folder.path / "last").symlink_to(target)
    assert folder.find("last").name == "step-000000020"


def test_a_repeated_step_is_the_last(folder: CheckpointFolder) -> None:
    """After a return to an earlier step, the run reaches the later steps again."""
    for step in (100, 200, 150, 200):
        folder.write(step, FILES)
    assert folder.find("last").name == "step-000000200"


@pytest.mark.parametrize("which", ["30", "best", "newest", "last "])
def test_missing_checkpoint_raises_with_existing_steps(folder: CheckpointFolder, which: str) -> None:
    folder.keep = 3
    for step in (10, 20):
        folder.write(step, FILES)
    with pytest.raises(CheckpointError) as raised:
        folder.find(which)
    assert raised.value.value == f"{folder.path} has no checkpoint {which!r}"
    assert raised.value.fix == "steps: 10, 20"


def test_newest_valid_skips_damaged_checkpoints(folder: CheckpointFolder) -> None:
    assert folder.newest_valid() is None
    folder.keep = 9
    for step in (10, 20, 40, 30):  # return to step 20
        folder.write(step, FILES)
    for step in (30, 20, 10, 40):
        newest = folder.newest_valid()
        assert newest is not None
        assert newest.name == f"step-{step:09d}"
        (newest / "empty").write_bytes(b"damage")
    assert folder.newest_valid() is None


@pytest.mark.parametrize("target", ["..", "/", "../elsewhere", "step-000000010/../../elsewhere", "elsewhere"])
def test_links_out_of_the_folder_are_not_followed(folder: CheckpointFolder, target: str) -> None:
    CheckpointFolder(folder.path.parent / "elsewhere").write(10, FILES)
    for step in (10, 20):
        folder.write(step, FILES, is_best=True)
    for name in ("last", "best"):
        (folder.path / name).unlink()
        (folder.path / name).symlink_to(target)
    assert folder.find("last").name == "step-000000020"
    with pytest.raises(CheckpointError):
        folder.find("best")


def test_a_link_is_not_a_checkpoint(folder: CheckpointFolder) -> None:
    elsewhere = CheckpointFolder(folder.path.parent / "elsewhere").write(30, FILES)
    folder.write(10, FILES)
    (folder.path / "step-000000030").symlink_to(elsewhere)
    assert steps(folder) == [10]
    folder.write(30, {"a": b"1"})
    assert steps(folder) == [10, 30]
    verify(elsewhere)


def test_other_names_are_not_checkpoints(folder: CheckpointFolder) -> None:
    folder.write(10, FILES)
    for name in ("step-000000020-copy", "step-20", "step-"):
        (folder.path / name).mkdir()
    assert steps(folder) == [10]


def test_find_last_in_a_copy_without_links(folder: CheckpointFolder, tmp_path: Path) -> None:
    folder.write(10, FILES)
    copy = CheckpointFolder(shutil.copytree(folder.path, tmp_path / "copy"))
    verify(copy.find("last"))


# --- verifying --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests damage and repair."""
    return CheckpointFolder(tmp_path_factory.mktemp("checkpoints")).write(7, FILES)


@contextmanager
def damaged(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@given(data=st.data())
@settings(max_examples=250)
def test_a_flipped_bit_is_detected(checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in [*FILES, MANIFEST] if (checkpoint / name).stat().st_size]))
    flipped = bytearray((checkpoint / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(flipped) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    with damaged(checkpoint / name, bytes(flipped)), pytest.raises(CheckpointError):
        verify(checkpoint)
    verify(checkpoint)


@pytest.mark.parametrize("name", [name for name in [*FILES, MANIFEST] if name != "empty"])
@given(data=st.data())
@settings(max_examples=20)
def test_another_length_is_detected(checkpoint: Path, name: str, data: st.DataObject) -> None:
    content = (checkpoint / name).read_bytes()
    for other in (content + b"\0", content[: data.draw(st.integers(0, len(content) - 1))]):
        with damaged(checkpoint / name, other), pytest.raises(CheckpointError):
            verify(checkpoint)


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_file_is_detected(folder: CheckpointFolder, name: str, is_folder: bool) -> None:
    path = folder.write(1, FILES)
    (path / name).unlink()
    if is_folder:
        (path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "3", '"text"', '{"sha256": "0"}', "[1, 2]", "\ufeff{}", "nan", "{" * 5000]
)
def test_an_invalid_manifest_is_detected(checkpoint: Path, text: str) -> None:
    with damaged(checkpoint / MANIFEST, text.encode()), pytest.raises(CheckpointError, match=MANIFEST):
        verify(checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"].pop("state.json"),
        lambda manifest: manifest["files"]["state.json"].update(bytes=12),
        lambda manifest: manifest["files"].update(other=manifest["files"]["state.json"]),
        lambda manifest: manifest.update(format=3),
        lambda manifest: manifest.update(note="x"),
        lambda manifest: manifest.pop("sha256"),
    ],
)
def test_a_changed_manifest_is_detected(checkpoint: Path, change: object) -> None:
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    change(manifest)  # type: ignore[operator]
    with damaged(checkpoint / MANIFEST, json.dumps(manifest).encode()), pytest.raises(CheckpointError):
        verify(checkpoint)


def test_read_state_verifies_all_files(folder: CheckpointFolder) -> None:
    state = {
        "progress": {"step": 7},
        "aliases": {},
        "optimizer": {"numbers": {}, "groups": []},
        "scheduler": None,
        "scaler": {},
    }
    path = folder.write(1, {"state.json": json.dumps(state).encode(), "empty": b""})
    assert read_state(path).progress.step == 7
    (path / "empty").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="empty has 1 bytes instead of 0"):
        read_state(path)
