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
RECORD_BYTES = 48


@pytest.fixture(autouse=True)
def entries_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_cache, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(sample_cache, "_REFRESH_SHARE", float("inf"))


def opened(folder: Path, limit: int | None = None) -> SampleCache:
    return SampleCache(folder, {"kind": "decoded", "source": "/photos"}, limit=limit, samples=100)


def content(number: int, size: int = 1000) -> bytes:
    return bytes([number % 256]) * size + number.to_bytes(4)


def key(number: int) -> tuple[int, int]:
    return number * 0x9E3779B97F4A7C15 % 2**64, number


def fill(cache: SampleCache, numbers: range) -> None:
    for number in numbers:
        cache.add(key(number), memoryview(content(number)), 2, 3)


def cached(cache: SampleCache, number: int) -> bytes | None:
    sample = cache.get(key(number), f"{number}.jpg")
    return None if sample is None else bytes(sample.data)


def only(folder: Path, suffix: str) -> Path:
    [path] = folder.glob(f"*{suffix}")
    return path


def in_fork(function: Callable[..., None], *arguments: object) -> int | None:
    process = FORK.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def test_entries_are_found_by_this_and_by_later_processes(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache, range(20))
    for reader in (cache, opened(tmp_path)):
        assert [cached(reader, number) for number in range(20)] == [content(number) for number in range(20)]
        assert cached(reader, 20) is None
        sample = reader.get(key(3), "3.jpg")
        assert sample is not None
        assert (sample.height, sample.width) == (2, 3)
        assert reader.entries == 20
        assert reader.take_reports() == []


def test_forks_write_parts_of_their_own(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache, range(5))
    for begin in (5, 10):
        assert in_fork(fill, cache, range(begin, begin + 5)) == 0
    cache.refresh()
    assert [cached(cache, number) for number in range(15)] == [content(number) for number in range(15)]
    assert len(list(tmp_path.glob("*.data"))) == 3


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    writers = [FORK.Process(target=lambda: fill(opened(tmp_path), range(200))) for _ in range(2)]
    for writer in writers:
        writer.start()
    reader = opened(tmp_path)
    while any(writer.is_alive() for writer in writers):
        assert all(cached(reader, number) in (None, content(number)) for number in range(200))
        reader.refresh()
    assert [writer.exitcode for writer in writers] == [0, 0]
    reader.refresh()
    assert [cached(reader, number) for number in range(200)] == [content(number) for number in range(200)]
    assert reader.take_reports() == []


def test_killed_writer_leaves_its_complete_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, calls = os.pwrite, iter(range(1000))

    def killed(descriptor: int, data: memoryview, offset: int) -> int:
        if next(calls) == 6:  # in the data of the fourth entry
            pwrite(descriptor, data[:500], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", killed)
        assert in_fork(lambda: fill(opened(tmp_path), range(9))) == -signal.SIGKILL
    cache = opened(tmp_path)
    assert [cached(cache, number) for number in range(4)] == [*map(content, range(3)), None]
    fill(cache, range(3, 9))
    assert [cached(cache, number) for number in range(9)] == [content(number) for number in range(9)]


@pytest.mark.parametrize(
    ("suffix", "byte"),
    [
        (".data", 2 * 1024 + 100),  # of the third entry; entries begin at multiples of 64 bytes
        *[(".index", 2 * RECORD_BYTES + place) for place in (17, 25, 32, 36, 40)],
    ],
)
def test_part_with_a_damaged_entry_is_reported_and_replaced(suffix: str, byte: int, tmp_path: Path) -> None:
    writer = opened(tmp_path)
    fill(writer, range(5))
    assert in_fork(fill, writer, range(5, 10)) == 0
    part = next(path for path in tmp_path.glob(f"*{suffix}") if path.name.startswith(f"{os.getpid()}-"))
    flip_bit(part, 8 * byte)
    first, second = opened(tmp_path), opened(tmp_path)
    numbers = range(10)
    assert [cached(first, number) for number in numbers] == [
        content(0),
        content(1),
        *[None] * 3,
        *map(content, range(5, 10)),
    ]
    [report] = first.take_reports()
    assert "2.jpg" in report
    assert part.stem in report
    assert len(list(tmp_path.glob("*.data"))) == 1
    fill(first, range(5))
    for reader in (first, second, opened(tmp_path)):
        reader.refresh()
        assert [cached(reader, number) for number in numbers] == [content(number) for number in numbers]
        assert reader.take_reports() == []
    fill(writer, range(10, 11))  # begins another part
    assert cached(opened(tmp_path), 10) == content(10)


def test_entry_is_verified_once_per_rank(tmp_path: Path) -> None:
    """The loader workers of a rank share the result; another rank verifies again."""
    fill(opened(tmp_path), range(3))
    rank, other = opened(tmp_path), opened(tmp_path)
    assert in_fork(lambda: [cached(rank, number) for number in range(3)]) == 0
    flip_bit(only(tmp_path, ".data"), 8 * 10)
    assert cached(rank, 0) not in (None, content(0))
    assert cached(other, 0) is None


def test_truncated_data_file(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(5))
    os.truncate(only(tmp_path, ".data"), 2 * 1024 + 100)
    cache = opened(tmp_path)
    assert [cached(cache, number) is not None for number in range(5)] == [True, True, False, False, False]
    assert len(cache.take_reports()) == 1
    fill(cache, range(5))
    assert [cached(cache, number) for number in range(5)] == [content(number) for number in range(5)]


def test_index_that_ends_in_a_record(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(5))
    os.truncate(only(tmp_path, ".index"), 3 * RECORD_BYTES + 20)
    cache = opened(tmp_path)
    assert [cached(cache, number) is not None for number in range(5)] == [True, True, True, False, False]


def test_growth_ends_at_the_limit(tmp_path: Path) -> None:
    cache = opened(tmp_path, limit=5000)
    fill(cache, range(20))
    assert [cached(cache, number) is not None for number in range(20)] == [True] * 4 + [False] * 16
    assert cache.bytes <= 5000
    [report] = cache.take_reports()
    assert "data.cache_gb" in report
    fill(opened(tmp_path, limit=5000), range(20, 30))  # a later run with the same limit
    assert opened(tmp_path).entries == 4


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
    reader, other = opened(tmp_path / "a"), opened(tmp_path / "a")
    assert cached(reader, 0) == content(0)
    (tmp_path / "a").rename(tmp_path / "b")
    fill(cache, range(3, 5))
    assert cached(reader, 1) == content(1)  # mapped
    assert cached(other, 1) is None
    [report] = cache.take_reports()
    assert "cannot be written" in report
    assert other.take_reports() == []
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
