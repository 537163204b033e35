"""Sample files that are damaged, or lost during a run."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.photos import FOLDERS, write_folders
from helpers.surroundings import RecordFault, nothing_left_behind, require_single_report
from helpers.system import Done, Running, here, last_saved, weights

RUN = "runs/a"
FILE = re.compile(r"\d\.jpg .*\[E_UNREADABLE\]$")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    write_folders(path)
    assert here("train", "images", "--name", "a", *FOLDERS, cwd=path) == 0
    return weights(path / RUN)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_folders(tmp_path)
    return tmp_path


def train(root: Path) -> Running:
    machine = ("--processes", 2, "--workers", 1, "--checkpoint-every", 3)
    return Running("train", "images", "--name", "a", *machine, *FOLDERS, cwd=root)


def ended(root: Path, running: Running) -> Done:
    with nothing_left_behind(running, root):
        return running.wait(90)


def require_resumable(root: Path, undisturbed: tuple[str, str]) -> None:
    assert here("resume", RUN, "--processes", 3, cwd=root) == 0
    assert weights(root / RUN) == undisturbed


@pytest.mark.slow
def test_truncated_file(root: Path, record_fault: RecordFault) -> None:
    os.truncate(root / "photos" / "a" / "10.jpg", 500)
    with train(root) as running:
        title = require_single_report(ended(root, running), 2)
    assert "10.jpg" in title
    assert title.endswith("[E_UNREADABLE]")
    fault = "a sample file is truncated"
    record_fault(fault, "exit code 2; E_UNREADABLE names the file")


def lose(folder: Path) -> None:
    folder.rename(folder.with_name("lost"))


def truncate_all(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("lost"))
    for path in folder.glob("*/*"):
        os.truncate(path, 100)


DURING: dict[str, Callable[[Path], None]] = {
    "all sample files are removed during an epoch": lose,
    "all sample files are truncated during an epoch": truncate_all,
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if number else pytest.mark.slow)
        for number, fault in enumerate(DURING)
    ],
)
def test_files_lost_during_an_epoch(
    fault: str, root: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    with train(root) as running:
        running.until(lambda: last_saved(root / RUN), "a checkpoint", 60)
        DURING[fault](root / "photos")
        title = require_single_report(ended(root, running), 2)
    assert FILE.search(title)
    if (root / "photos").exists():
        (root / "photos").rename(root / "truncated")
    (root / "lost").rename(root / "photos")
    require_resumable(root, undisturbed)
    record_fault(fault, "exit code 2; E_UNREADABLE names a file; resumed on 3: the same weights")
