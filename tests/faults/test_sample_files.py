"""Sample files that are damaged, or lost during a run."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import sample_files
from helpers.sample_files import IMAGES
from helpers.surroundings import RecordFault, nothing_left_behind, require_single_report
from helpers.system import Done, Running, here, last_saved, weights

RUN = "runs/a"
FILE = re.compile(r"\d\.parquet")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    sample_files.write_images(path)
    assert here("train", "images", "--name", "a", *IMAGES, cwd=path) == 0
    return weights(path / RUN)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    sample_files.write_images(tmp_path)
    return tmp_path


def train(root: Path) -> Running:
    machine = ("--processes", 2, "--workers", 1, "--checkpoint-every", 3)
    return Running("train", "images", "--name", "a", *machine, *IMAGES, cwd=root)


def ended(root: Path, running: Running) -> Done:
    with nothing_left_behind(running, root):
        return running.wait(90)


def require_resumable(root: Path, undisturbed: tuple[str, str]) -> None:
    assert here("resume", RUN, "--processes", 3, cwd=root) == 0
    assert weights(root / RUN) == undisturbed


@pytest.mark.slow
def test_truncated_file(root: Path, record_fault: RecordFault) -> None:
    os.truncate(root / "photos" / "9.parquet", 5000)
    with train(root) as running:
        title = require_single_report(ended(root, running), 2)
    assert "9.parquet" in title
    assert title.endswith("[E_UNREADABLE]")
    fault = "a sample file is truncated"
    record_fault(fault, "exit code 2; E_UNREADABLE names the file")


def lose(folder: Path) -> None:
    folder.rename(folder.with_name("lost"))


def truncate_all(folder: Path) -> None:
    folder.with_name("lost").mkdir()
    for path in folder.iterdir():
        (folder.with_name("lost") / path.name).write_bytes(path.read_bytes())
        os.truncate(path, 100)


DURING: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "all sample files are removed during an epoch": (lose, ("E_FILE_MISSING",)),
    "all sample files are truncated during an epoch": (truncate_all, ("E_FILE_CHANGED", "E_UNREADABLE")),
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
    damage, codes = DURING[fault]
    with train(root) as running:
        running.until(lambda: last_saved(root / RUN), "a checkpoint", 60)
        damage(root / "photos")
        title = require_single_report(ended(root, running), 2)
    assert FILE.search(title)
    assert title.endswith(tuple(f"[{code}]" for code in codes))
    if (root / "photos").exists():
        (root / "photos").rename(root / "truncated")
    (root / "lost").rename(root / "photos")
    require_resumable(root, undisturbed)
    record_fault(fault, f"exit code 2; {' or '.join(codes)} names a file; resumed on 3: the same weights")
