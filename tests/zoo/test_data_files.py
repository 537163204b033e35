"""Files of folders with links, hidden files and several suffixes."""

import errno
import os
from pathlib import Path

import pytest

from samestep.zoo.data_files import files_below


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def found(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in files_below(root)]


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
