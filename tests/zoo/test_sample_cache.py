"""Cache of samples: entries of several processes, damage, limits and errors of the disk."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import flip_bit
from samestep.zoo import sample_cache
from samestep.zoo.sample_cache import SampleCache, file_key

FORK = multiprocessing.get_context("fork")


def opened(folder: Path, limit: int | None = None) -> SampleCache:
    return SampleCache(folder, {"kind": "decoded", "source": "/photos"}, limit=limit, samples=100)


def content(number: int, size: int = 1000) -> bytes:
    return bytes([number % 256]) * size + number.to_bytes(4)


def key(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15:032x}"


def fill(cache: SampleCache, numbers: range) -> None:
    for number in numbers:
        cache.add(key(number), memoryview(content(number)), 2, 3)


def cached(cache: SampleCache, number: int) -> bytes | None:
    sample = cache.get(key(number), f"{number}.jpg")
    return None if sample is None else sample.data.numpy().tobytes()


def file_of(folder: Path, number: int) -> Path:
    return folder / f"{key(number)}.data"


def in_fork(function: Callable[..., None], *arguments: object) -> int | None:
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def test_entries_are_found_by_this_and_by_later_processes(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache, range(10))
    assert in_fork(fill, cache, range(10, 20)) == 0
    for reader in (cache, opened(tmp_path)):
        assert [cached(reader, number) for number in range(20)] == [content(number) for number in range(20)]
        assert cached(reader, 20) is None
        sample = reader.get(key(3), "3.jpg")
        assert sample is not None
        assert (sample.height, sample.width) == (2, 3)
        assert reader.usage()[0] == 20
        assert reader.take_reports() == []


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    writers = [FORK.Process(target=lambda: fill(opened(tmp_path), range(200))) for _ in range(2)]
    for writer in writers:
        writer.start()
    reader = opened(tmp_path)
    while any(writer.is_alive() for writer in writers):
        assert all(cached(reader, number) in (None, content(number)) for number in range(200))
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [cached(reader, number) for number in range(200)] == [content(number) for number in range(200)]
    assert reader.take_reports() == []


def test_killed_writer_leaves_its_complete_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = Path.replace, iter(range(1000))

    def killed(path: Path, target: Path) -> Path:
        if next(calls) == 4:  # the description of the cache is the first file
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        assert in_fork(lambda: fill(opened(tmp_path), range(9))) == -signal.SIGKILL
    cache = opened(tmp_path)
    assert cache.usage()[0] == 3
    assert [cached(cache, number) for number in range(4)] == [*map(content, range(3)), None]
    fill(cache, range(3, 9))
    assert [cached(cache, number) for number in range(9)] == [content(number) for number in range(9)]
    assert cache.take_reports() == []


@pytest.mark.parametrize("byte", [*range(0, 12, 3), 12, 500, 1015])
def test_damaged_entry_is_reported_and_replaced(byte: int, tmp_path: Path) -> None:
    fill(opened(tmp_path), range(5))
    flip_bit(file_of(tmp_path, 2), 8 * byte)
    first, second = opened(tmp_path), opened(tmp_path)
    assert [cached(first, number) is not None for number in range(5)] == [True, True, False, True, True]
    [report] = first.take_reports()
    assert "2.jpg" in report
    assert first.usage()[0] == 4
    fill(first, range(2, 3))
    for reader in (first, second, opened(tmp_path)):
        assert [cached(reader, number) for number in range(5)] == [content(number) for number in range(5)]
        assert reader.take_reports() == []


@pytest.mark.parametrize("size", [0, 5, 12, 1000])
def test_truncated_entry(size: int, tmp_path: Path) -> None:
    fill(opened(tmp_path), range(2))
    os.truncate(file_of(tmp_path, 1), size)
    cache = opened(tmp_path)
    assert [cached(cache, number) is not None for number in range(2)] == [True, False]
    assert len(cache.take_reports()) == 1
    fill(cache, range(1, 2))
    assert cached(cache, 1) == content(1)


def test_entry_that_is_no_file(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    os.mkfifo(file_of(tmp_path, 0))
    assert cached(cache, 0) is None


def test_entry_is_verified_once_per_rank(tmp_path: Path) -> None:
    """The loader workers of a rank share the result; another rank verifies again."""
    fill(opened(tmp_path), range(3))
    rank, other = opened(tmp_path), opened(tmp_path)
    assert in_fork(lambda: [cached(rank, number) for number in range(3)]) == 0
    file = file_of(tmp_path, 0)
    status = file.stat()
    flip_bit(file, 8 * 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached(rank, 0) not in (None, content(0))
    assert cached(other, 0) is None


def test_growth_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "_COUNT_SHARE", float("inf"))  # bytes are counted at each addition
    cache = opened(tmp_path, limit=5000)
    assert in_fork(fill, cache, range(2)) == 0
    fill(cache, range(2, 20))
    assert [cached(cache, number) is not None for number in range(20)] == [True] * 4 + [False] * 16
    assert cache.usage()[1] <= 5000
    [report] = cache.take_reports()
    assert "data.cache_gb" in report
    fill(opened(tmp_path, limit=5000), range(20, 30))  # a later run with the same limit
    assert cache.usage()[0] == 4


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    cache = opened(tmp_path / "file" / "cache")
    fill(cache, range(2))
    assert cached(cache, 0) is None
    [report] = cache.take_reports()
    assert "Not a directory" in report


def test_folder_that_is_removed_during_use(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a")
    fill(cache, range(3))
    reader = opened(tmp_path / "a")
    sample = reader.get(key(0), "0.jpg")
    (tmp_path / "a").rename(tmp_path / "b")
    fill(cache, range(3, 5))
    assert sample is not None
    assert sample.data.numpy().tobytes() == content(0)  # mapped
    assert cached(reader, 1) is None
    [report] = cache.take_reports()
    assert "cannot be written" in report
    assert reader.take_reports() == []
    assert [cached(opened(tmp_path / "b"), number) is not None for number in range(5)] == [True] * 3 + [False] * 2


def test_key_depends_on_path_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"1")
    os.utime(file, ns=(0, 10))
    first = file_key(file, file.stat())
    assert file_key(str(file), file.stat()) == first
    assert file_key(tmp_path / "b", file.stat()) != first
    os.utime(file, ns=(0, 11))
    assert file_key(file, file.stat()) != first
    file.write_bytes(b"22")
    os.utime(file, ns=(0, 10))
    assert file_key(file, file.stat()) != first
