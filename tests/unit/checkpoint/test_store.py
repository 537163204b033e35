"""A checkpoint is complete or not there, and nothing but what was written is ever read."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ranks_store
from ranks_store import FILES
from samestep import launch
from samestep.checkpoint.manifest import MANIFEST, read_json, verify
from samestep.checkpoint.store import CheckpointFolder
from samestep.errors import CheckpointError, CheckpointWriteError, InputError
from samestep.runtime.launch import RankError


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def steps(folder: CheckpointFolder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in folder.steps()]


# --- writing ----------------------------------------------------------------------------------------------


def test_what_is_written_is_there_and_whole(folder: CheckpointFolder) -> None:
    path = folder.write(7, FILES)
    assert path.name == "step-000000007"
    verify(path)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != MANIFEST} == FILES
    assert names(folder) == ["last", "step-000000007"]


def test_the_manifest_has_hash_and_length_of_every_file(folder: CheckpointFolder) -> None:
    said = json.loads((folder.write(1, FILES) / MANIFEST).read_bytes())
    assert {name: facts["bytes"] for name, facts in said["files"].items()} == {n: len(d) for n, d in FILES.items()}
    assert all(len(facts["sha256"]) == 64 for facts in said["files"].values())


def test_equal_content_gives_equal_bytes(folder: CheckpointFolder, tmp_path: Path) -> None:
    other = CheckpointFolder(tmp_path / "other")
    first, second = folder.write(3, FILES), other.write(3, FILES)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in [*FILES, MANIFEST])


def test_a_checkpoint_that_is_there_is_left_as_it_is(folder: CheckpointFolder) -> None:
    path = folder.write(1, {"a": b"first"})
    before = [(file, file.stat().st_ino) for file in sorted(path.iterdir())]
    assert folder.write(1, {"a": b"first"}) == path
    assert [(file, file.stat().st_ino) for file in sorted(path.iterdir())] == before
    assert names(folder) == ["last", "step-000000001"]


def test_another_one_of_the_same_step_takes_its_place(folder: CheckpointFolder) -> None:
    path = folder.write(1, {"a": b"before an evaluation", "b": b""})
    assert folder.write(1, {"a": b"after it"}) == path
    verify(path)
    assert (path / "a").read_bytes() == b"after it"
    assert names(folder) == ["last", "step-000000001"]


def test_one_that_was_about_to_be_replaced_counts_until_it_is(folder: CheckpointFolder) -> None:
    folder.write(2, {"a": b"old"}, is_best=True)
    replaced = folder.path / ".replaced-step-000000002"
    (folder.path / "step-000000002").rename(replaced)
    folder.clean()
    assert [folder.find(which) for which in ("last", "best", "2")] == [replaced] * 3
    assert folder.newest_whole() == replaced
    folder.write(3, {"a": b"new"})
    assert names(folder) == ["best", "last", "step-000000002", "step-000000003"]


def test_one_that_was_replaced_is_cleaned_away(folder: CheckpointFolder) -> None:
    path = folder.write(2, {"a": b"new"})
    shutil.copytree(path, folder.path / ".replaced-step-000000002")
    assert folder.steps() == [path]
    folder.clean()
    assert names(folder) == ["last", "step-000000002"]


@pytest.mark.parametrize("keep", [0, -1])
def test_one_checkpoint_must_stay(tmp_path: Path, keep: int) -> None:
    with pytest.raises(InputError, match=f"keep is {keep}"):
        CheckpointFolder(tmp_path, keep)


def test_the_folders_above_are_made(tmp_path: Path) -> None:
    verify(CheckpointFolder(tmp_path / "a" / "b" / "c").write(1, FILES))


def test_a_failed_write_leaves_no_checkpoint(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    with pytest.raises(CheckpointWriteError, match=r"step 2 cannot be written .*: No such file"):
        folder.write(2, {"a": b"1", "no-such-folder/b": b"2"})
    assert names(folder) == ["last", "step-000000001"]
    assert steps(folder) == [1]
    assert folder.find("last").name == "step-000000001"


def test_a_kill_while_writing_leaves_what_was_there(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    with pytest.raises(RankError, match="killed by SIGXFSZ"):
        launch(ranks_store.be_killed_while_writing, folder.path, 2, processes=1)
    assert steps(folder) == [1]
    assert any(name.startswith(".writing-") for name in names(folder))
    folder.clean()
    assert names(folder) == ["last", "step-000000001"]
    verify(folder.write(2, FILES))


def test_a_write_that_failed_can_be_tried_again(folder: CheckpointFolder) -> None:
    with pytest.raises(CheckpointWriteError):
        folder.write(2, {"a": b"1", "no-such-folder/b": b"2"})
    verify(folder.write(2, FILES))


def test_cleaning_removes_every_kind_of_leftover(folder: CheckpointFolder) -> None:
    folder.write(1, FILES)
    (folder.path / ".writing-step-000000002-77").mkdir()
    (folder.path / ".writing-step-000000002-77" / "model").write_bytes(b"half")
    (folder.path / ".writing-removed-step-000000000").mkdir()
    (folder.path / ".last-77").symlink_to("step-000000001")
    folder.clean()
    assert names(folder) == ["last", "step-000000001"]


def test_cleaning_before_the_first_checkpoint_does_nothing(folder: CheckpointFolder) -> None:
    folder.clean()
    assert folder.steps() == []


def test_writers_of_the_same_checkpoint_do_not_hinder_each_other(tmp_path: Path) -> None:
    launch(ranks_store.write_together, tmp_path, processes=4)
    for attempt in range(5):
        path = tmp_path / str(attempt)
        assert sorted(entry.name for entry in path.iterdir()) == ["last", "step-000000005"]
        verify(path / "last")


# --- keeping ----------------------------------------------------------------------------------------------


def test_the_newest_are_kept(folder: CheckpointFolder) -> None:
    for step in range(1, 6):
        folder.write(step, FILES)
        assert steps(folder) == [s for s in (step - 1, step) if s]
    assert names(folder) == ["last", "step-000000004", "step-000000005"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_are_kept_as_was_asked(tmp_path: Path, keep: int) -> None:
    folder = CheckpointFolder(tmp_path, keep)
    for step in range(10, 60, 10):
        folder.write(step, FILES)
    assert steps(folder) == [10, 20, 30, 40, 50][-keep:]


def test_the_best_is_kept_besides(folder: CheckpointFolder) -> None:
    for step in range(1, 7):
        folder.write(step, FILES, is_best=step in (1, 3))
    assert steps(folder) == [3, 5, 6]
    assert folder.find("best").name == "step-000000003"


def test_steps_are_in_order_of_number_not_of_name(folder: CheckpointFolder) -> None:
    folder.keep = 9
    for step in (999_999_999, 5, 40, 3):
        folder.write(step, FILES)
    assert steps(folder) == [3, 5, 40, 999_999_999]


def test_what_was_just_written_is_kept_though_a_later_step_is_there(tmp_path: Path) -> None:
    """Someone who goes back to an earlier step leaves a newer one of the old course behind."""
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.write(200, FILES)
    assert folder.write(150, FILES).is_dir()


@settings(max_examples=15)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3))
def test_the_newest_and_the_best_stay_whatever_happens(best: list[bool], keep: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = CheckpointFolder(Path(name), keep)
        for step, is_best in enumerate(best):
            folder.write(step, {"a": b"1"}, is_best=is_best)
        expected = set(range(len(best))[-keep:]) | ({max(s for s, b in enumerate(best) if b)} if any(best) else set())
        assert steps(folder) == sorted(expected)
        for path in folder.steps():
            verify(path)


# --- finding ----------------------------------------------------------------------------------------------


def test_last_best_and_steps_are_found(folder: CheckpointFolder) -> None:
    for step in (10, 20):
        folder.write(step, FILES, is_best=step == 10)
    assert [folder.find(which).name for which in ("last", "best", "10", "20")] == [
        "step-000000020",
        "step-000000010",
        "step-000000010",
        "step-000000020",
    ]


@pytest.mark.parametrize("pointer", [None, "step-000000030"])
def test_without_a_pointer_to_it_the_last_is_the_highest_step(folder: CheckpointFolder, pointer: str | None) -> None:
    for step in (10, 20):
        folder.write(step, FILES)
    (folder.path / "last").unlink()
    if pointer is not None:
        (folder.path / "last").symlink_to(pointer)
    assert folder.find("last").name == "step-000000020"


def test_the_last_does_not_depend_on_file_times(folder: CheckpointFolder) -> None:
    """A copy of a run, or a file that somebody puts into a checkpoint, changes them."""
    for step in (10, 20):
        folder.write(step, FILES)
    later = (folder.path / "step-000000020").stat().st_mtime + 60
    os.utime(folder.path / "step-000000010", (later, later))
    assert folder.find("last").name == "step-000000020"


def test_what_is_kept_does_not_depend_on_file_times(folder: CheckpointFolder) -> None:
    for step in (10, 20):
        folder.write(step, FILES)
    later = (folder.path / "step-000000020").stat().st_mtime + 60
    os.utime(folder.path / "step-000000010", (later, later))
    folder.write(30, FILES)
    assert steps(folder) == [20, 30]


def test_a_step_that_is_reached_again_is_the_last(folder: CheckpointFolder) -> None:
    """Someone who goes back to an earlier step comes to the later ones again in the end."""
    for step in (100, 200, 150, 200):
        folder.write(step, FILES)
    assert folder.find("last").name == "step-000000200"


@pytest.mark.parametrize("which", ["30", "best", "newest", "last "])
def test_what_is_not_there_is_refused_with_what_is(folder: CheckpointFolder, which: str) -> None:
    folder.keep = 3
    for step in (10, 20):
        folder.write(step, FILES)
    with pytest.raises(CheckpointError) as refused:
        folder.find(which)
    assert refused.value.value == f"{folder.path} has no checkpoint {which!r}"
    assert refused.value.do == "steps: 10, 20"


@pytest.mark.parametrize("which", ["last", "best", "1"])
def test_before_the_first_checkpoint_nothing_is_found(folder: CheckpointFolder, which: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        folder.find(which)
    assert refused.value.do == "steps: none"


def test_the_newest_whole_one_is_the_last_that_can_be_verified(folder: CheckpointFolder) -> None:
    assert folder.newest_whole() is None
    folder.keep = 9
    for step in (10, 20, 40, 30):  # somebody went back to 20
        folder.write(step, FILES)
    for step in (30, 20, 10, 40):
        newest = folder.newest_whole()
        assert newest is not None
        assert newest.name == f"step-{step:09d}"
        (newest / "empty").write_bytes(b"damage")
    assert folder.newest_whole() is None


@pytest.mark.parametrize("target", ["..", "/", "../elsewhere", "step-000000010/../../elsewhere", "elsewhere"])
def test_links_that_lead_out_of_the_folder_are_not_followed(folder: CheckpointFolder, target: str) -> None:
    CheckpointFolder(folder.path.parent / "elsewhere").write(10, FILES)
    for step in (10, 20):
        folder.write(step, FILES, is_best=True)
    for name in ("last", "best"):
        (folder.path / name).unlink()
        (folder.path / name).symlink_to(target)
    assert folder.find("last").name == "step-000000020"
    with pytest.raises(CheckpointError):
        folder.find("best")


def test_a_link_in_the_place_of_a_checkpoint_is_none(folder: CheckpointFolder) -> None:
    elsewhere = CheckpointFolder(folder.path.parent / "elsewhere").write(30, FILES)
    folder.write(10, FILES)
    (folder.path / "step-000000030").symlink_to(elsewhere)
    assert steps(folder) == [10]
    folder.write(30, {"a": b"1"})
    assert steps(folder) == [10, 30]
    verify(elsewhere)


def test_names_of_other_things_are_no_checkpoints(folder: CheckpointFolder) -> None:
    folder.write(10, FILES)
    for name in ("step-000000020-copy", "step-20", "step-"):
        (folder.path / name).mkdir()
    assert steps(folder) == [10]


def test_a_copy_without_links_has_a_last_one(folder: CheckpointFolder, tmp_path: Path) -> None:
    folder.write(10, FILES)
    copy = CheckpointFolder(shutil.copytree(folder.path, tmp_path / "copy"))
    verify(copy.find("last"))


# --- verifying --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests damage and mend."""
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
def test_a_flipped_bit_in_any_file_is_noticed(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in [*FILES, MANIFEST] if (whole / name).stat().st_size]))
    flipped = bytearray((whole / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(flipped) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    with damaged(whole / name, bytes(flipped)), pytest.raises(CheckpointError):
        verify(whole)
    verify(whole)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_longer_file_is_noticed(whole: Path, name: str) -> None:
    with damaged(whole / name, (whole / name).read_bytes() + b"\0"), pytest.raises(CheckpointError):
        verify(whole)


@pytest.mark.parametrize("name", [name for name in [*FILES, MANIFEST] if name != "empty"])
@given(data=st.data())
@settings(max_examples=20)
def test_a_shorter_file_is_noticed(whole: Path, name: str, data: st.DataObject) -> None:
    content = (whole / name).read_bytes()
    with damaged(whole / name, content[: data.draw(st.integers(0, len(content) - 1))]), pytest.raises(CheckpointError):
        verify(whole)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_file_is_noticed(folder: CheckpointFolder, name: str) -> None:
    path = folder.write(1, FILES)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(path)


def test_a_folder_in_the_place_of_a_file_is_noticed(folder: CheckpointFolder) -> None:
    path = folder.write(1, FILES)
    (path / "empty").unlink()
    (path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is missing"):
        verify(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "3", '"text"', '{"sha256": "0"}', "[1, 2]", "\ufeff{}", "nan", "{" * 5000]
)
def test_a_manifest_that_is_something_else_is_noticed(whole: Path, text: str) -> None:
    with damaged(whole / MANIFEST, text.encode()), pytest.raises(CheckpointError, match=MANIFEST):
        verify(whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["files"].pop("state.json"),
        lambda said: said["files"]["state.json"].update(bytes=12),
        lambda said: said["files"].update(other=said["files"]["state.json"]),
        lambda said: said.update(format=2),
        lambda said: said.update(note="x"),
        lambda said: said.pop("sha256"),
    ],
)
def test_what_the_manifest_says_cannot_change(whole: Path, change: object) -> None:
    said = json.loads((whole / MANIFEST).read_bytes())
    change(said)  # type: ignore[operator]
    with damaged(whole / MANIFEST, json.dumps(said).encode()), pytest.raises(CheckpointError):
        verify(whole)


def test_files_of_another_checkpoint_are_noticed(folder: CheckpointFolder) -> None:
    first, second = folder.write(1, {"a": b"12"}), folder.write(2, {"a": b"34"})
    (second / "a").write_bytes((first / "a").read_bytes())
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        verify(second)


def test_what_is_read_was_verified(folder: CheckpointFolder) -> None:
    path = folder.write(1, FILES)
    assert read_json(path, "state.json") == {"step": 7}
    (path / "empty").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="empty has 1 bytes, not the 0 that were written"):
        read_json(path, "state.json")


def test_damage_is_told_with_a_way_out(folder: CheckpointFolder) -> None:
    path = folder.write(1, FILES)
    (path / "empty").unlink()
    with pytest.raises(CheckpointError) as refused:
        verify(path)
    assert refused.value.rule == "a checkpoint is verified whole before anything of it is loaded"
    assert refused.value.do is not None
