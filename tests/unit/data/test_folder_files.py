"""Files of folders with links, hidden files and several suffixes."""

import errno
import os
from pathlib import Path

import pytest

from samestep.data.folder_files import by_suffix, files_below, left_out_notes


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def found(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in files_below(root)]


def test_order_is_that_of_paths(tmp_path: Path) -> None:
    root = touch(tmp_path, "b/2.txt", "b.txt", "b-/1.txt", "a/c/3.txt", "10.txt", "9.txt", "B/0.txt")
    assert files_below(root) == sorted(path for path in root.rglob("*") if path.is_file())


def test_hidden_files_are_left_out_below_the_folder_alone(tmp_path: Path) -> None:
    root = touch(tmp_path / ".store", "a/0.png", "a/._0.png", "a/.checkpoints/0-checkpoint.png", ".cache/x.png")
    assert found(root) == ["a/0.png"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    touch(tmp_path / "more", "sub/1.png")
    root = touch(tmp_path / "root", "a/0.png", "b/2.png", ".hidden/3.png")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "again").symlink_to(root / "b")
    (root / "a" / "more").symlink_to(tmp_path / "more")
    (root / "b" / "more").symlink_to(tmp_path / "more" / "sub")
    (root / "shown").symlink_to(root / ".hidden")
    (tmp_path / "more" / "back").symlink_to(root)
    (root / "broken.png").symlink_to(tmp_path / "none")
    (tmp_path / "link").symlink_to(root)
    files = ["a/0.png", "a/more/sub/1.png", "b/2.png", "broken.png", "shown/3.png"]
    assert found(root) == found(tmp_path / "link") == files


def test_disk_that_fails_is_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    assert files_below(tmp_path / "none") == []
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files_below(tmp_path)


def test_suffixes_have_any_case(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.TXT", "b.txt", "c.nii.gz", "txt", "d.md")]
    assert by_suffix(files, [".txt", ".NII.gz"]) == (files[:3], files[3:])
    [note] = left_out_notes(tmp_path, files[3:], [".txt"])
    assert note == f"left out 2 files of {tmp_path}, such as {tmp_path}/txt: their names do not end in .txt"
    assert left_out_notes(tmp_path, [], [".txt"]) == ()
