"""Sample files that are missing, damaged or lost during a run, failures of an object store, and a full disk."""

import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from helpers import sample_files
from helpers.disk_faults import mounted
from helpers.object_store import Server
from helpers.sample_files import IMAGES
from helpers.surroundings import RecordFault, nothing_left_behind, require_single_report
from helpers.system import Done, Running, flip_bit, here, last_saved, weights
from samestep.distributed.env import CACHE

RUN = "runs/a"
RESUMES = "ends with the name of the file; resumed to the same weights"
FILE = re.compile(r"shard\.\d{5}\.mds")
LAST = "shard.00009.mds"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("undisturbed")
    sample_files.write_images(path)
    assert here("train", "images", "--name", "a", "--set", *IMAGES, cwd=path) == 0
    return weights(path / RUN)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    sample_files.write_images(tmp_path)
    return tmp_path


def train(root: Path, *settings: str, **variables: str) -> Running:
    machine = ("--processes", 2, "--workers", 1, "--checkpoint-every", 3)
    variables = {CACHE: str(root / "cache"), **variables}
    return Running(
        "train", "images", "--name", "a", *machine, "--set", *IMAGES, *settings, cwd=root, variables=variables
    )


def ended(root: Path, running: Running) -> Done:
    with nothing_left_behind(running, root):
        return running.wait(90)


def require_resumable(root: Path, undisturbed: tuple[str, str]) -> None:
    assert here("resume", RUN, "--processes", 3, cwd=root) == 0
    assert weights(root / RUN) == undisturbed


STORED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a sample file is missing": (Path.unlink, "E_FILE_MISSING"),
    "a sample file is truncated": (partial(os.truncate, length=5000), "E_FILE_CHANGED"),
    "a bit of a sample file has changed": (partial(flip_bit, bit=80_000), "E_FILE_CHANGED"),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long if number else pytest.mark.slow)
        for number, fault in enumerate(STORED)
    ],
)
def test_damaged_file(fault: str, root: Path, record_fault: RecordFault) -> None:
    damage, code = STORED[fault]
    damage(root / "packed" / LAST)
    with train(root) as running:
        title = require_single_report(ended(root, running), 2)
    assert LAST in title
    assert title.endswith(f"[{code}]")
    record_fault(fault, "ends with the name of the file", f"exit code 2; {code} names the file")


def lose(folder: Path) -> None:
    folder.rename(folder.with_name("lost"))


def truncate_all(folder: Path) -> None:
    folder.with_name("lost").mkdir()
    for path in folder.iterdir():
        (folder.with_name("lost") / path.name).write_bytes(path.read_bytes())
        if path.suffix == ".mds":
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
        damage(root / "packed")
        title = require_single_report(ended(root, running), 2)
    assert FILE.search(title)
    assert title.endswith(tuple(f"[{code}]" for code in codes))
    if (root / "packed").exists():
        (root / "packed").rename(root / "truncated")
    (root / "lost").rename(root / "packed")
    require_resumable(root, undisturbed)
    record_fault(fault, RESUMES, f"exit code 2; {' or '.join(codes)} names a file; resumed on 3: the same weights")


# --- object store -----------------------------------------------------------------------------------------


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    with Server(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def at(server: Server, tries: int = 5) -> tuple[str, ...]:
    folders = (
        f"data.options.{key}={server.address}/{name}"
        for key, name in (("path", "packed"), ("evaluation_path", "packed_val"))
    )
    return *folders, f"data.options.store={{tries: {tries}}}"


@pytest.mark.slow
def test_errors_of_the_store_that_pass(
    root: Path, server: Server, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    for number, faults in enumerate(([500], [503, 503], [206], [203], [429, 206])):
        server.faults[f"packed/shard.{number:05}.mds"] = faults
    with train(root, *at(server)) as running:
        done = ended(root, running)
    assert done.code == 0, done.err
    assert not any(server.faults.values())
    assert weights(root / RUN) == undisturbed
    fault = "the object store answers with 500, 503, 429, half of a file, or other contents"
    record_fault(fault, "transferred again; the same weights", "exit code 0; the same weights")


@pytest.mark.long
def test_store_that_fails(root: Path, server: Server, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    server.faults["packed/" + LAST] = [503] * 1000
    with train(root, *at(server, tries=2)) as running:
        title = require_single_report(ended(root, running), 1)
    assert f"{server.address}/packed/{LAST}" in title
    assert title.endswith("[E_IO]")
    server.faults.clear()
    require_resumable(root, undisturbed)
    record_fault(
        "the object store answers with 503 always",
        RESUMES,
        "exit code 1; E_IO names the file; resumed on 3: the same weights",
    )


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=200k", "tmpfs")


@pytest.mark.long
def test_full_disk_of_the_cache(root: Path, server: Server, tiny_disk: Path, record_fault: RecordFault) -> None:
    with train(root, *at(server), **{CACHE: str(tiny_disk)}) as running:
        title = require_single_report(ended(root, running), 1)
    assert FILE.search(title)
    assert title.endswith("[E_IO]")
    record_fault(
        "the disk of a cache of files is full", "ends with the name of the file", "exit code 1; E_IO names the file"
    )
