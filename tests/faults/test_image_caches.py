"""Damage, full disks, kills and removal of a cache of images: the run has the weights of one without a cache."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.disk_faults import mounted
from helpers.photos import SMALL, write_photos
from helpers.surroundings import RecordFault, require_bounded
from helpers.system import Running, events, flip_bit, here, weights

SAME = "exit code 0; the same weights"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos") / "photos"
    write_photos(root)
    return root


@pytest.fixture(scope="module")
def undisturbed(photos: Path) -> tuple[str, str]:
    assert here("train", "images", "--name", "a", *settings(photos, "none"), cwd=photos.parent) == 0
    return weights(photos.parent / "runs/a")


def settings(photos: Path, cache: str = "decoded") -> tuple[str, ...]:
    return (*SMALL, f"data.options.path={photos}", f"data.cache={cache}")


def train(folder: Path, photos: Path, cache: Path, name: str = "a", *options: object) -> Running:
    arguments = ("train", "images", "--name", name, "--processes", 2, "--workers", 1, *options, *settings(photos))
    return Running(*arguments, cwd=folder, variables={"XDG_CACHE_HOME": str(cache)})


def complete(folder: Path, photos: Path, cache: Path, name: str = "a") -> list[str]:
    """Train to the end, and return the texts about the cache."""
    with train(folder, photos, cache, name) as running:
        done = running.wait(200)
    assert done.code == 0, done.err
    require_bounded(done.err)
    texts = [event["text"] for event in events(folder / "runs" / name, "cache")]
    assert all(text in done.err for text in texts)
    return texts


@pytest.mark.slow
def test_damaged_entries(photos: Path, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault) -> None:
    cache = tmp_path / "cache"
    assert len(complete(tmp_path, photos, cache)) == 1
    damaged = list(cache.glob("*/*/*.data"))
    for part in damaged:
        flip_bit(part, 8 * 1000)
    announcement, *warnings = complete(tmp_path, photos, cache, "b")
    assert "already there" in announcement
    assert warnings
    assert len(complete(tmp_path, photos, cache, "c")) == 1  # damaged entries were built again
    assert {weights(tmp_path / "runs" / name) for name in "abc"} == {undisturbed}
    record_fault("entries of a cache are damaged", SAME)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=200k", "tmpfs")


@pytest.mark.slow
def test_full_disk(
    photos: Path, tmp_path: Path, tiny_disk: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    _, *warnings = complete(tmp_path, photos, tiny_disk)
    assert any("does not grow any more: less than 5% of the disk" in warning for warning in warnings)
    assert weights(tmp_path / "runs/a") == undisturbed
    record_fault("the disk of a cache is full", SAME)


@pytest.mark.long
def test_kill_during_the_first_epoch(
    photos: Path, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    cache = tmp_path / "cache"
    with train(tmp_path, photos, cache) as running:
        running.until(lambda: len(list(cache.glob("*/*/*.data"))) > 1, "two entries", 150)
        running.kill_group(signal.SIGKILL)
        running.wait(30)
    announcement, *warnings = complete(tmp_path, photos, cache, "b")
    assert "already there" in announcement
    assert not warnings
    assert weights(tmp_path / "runs/b") == undisturbed
    record_fault("a run is killed while it builds a cache", SAME)


@pytest.mark.long
def test_two_runs_build_a_cache(
    photos: Path, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    cache = tmp_path / "cache"
    with train(tmp_path, photos, cache, "a") as first, train(tmp_path, photos, cache, "b") as second:
        ends = [running.wait(200) for running in (first, second)]
    assert [done.code for done in ends] == [0, 0]
    announcement, *warnings = complete(tmp_path, photos, cache, "c")
    assert "already there" in announcement
    assert not warnings
    assert {weights(tmp_path / "runs" / name) for name in "abc"} == {undisturbed}
    record_fault("two runs build a cache at once", SAME)


@pytest.mark.long
def test_removal_during_a_run(
    photos: Path, tmp_path: Path, undisturbed: tuple[str, str], record_fault: RecordFault
) -> None:
    cache = tmp_path / "cache"
    with train(tmp_path, photos, cache) as running:
        running.until(lambda: list(cache.glob("*/*/*.data")), "an entry", 150)
        variables = {"XDG_CACHE_HOME": str(cache)}
        with Running("doctor", "--clear-caches", cwd=tmp_path, variables=variables) as clear:
            assert clear.wait(150).code == 0
        done = running.wait(200)
    assert done.code == 0, done.err
    assert not list(cache.glob("*/*/*"))
    assert weights(tmp_path / "runs/a") == undisturbed
    record_fault("a cache is removed during a run", SAME)
