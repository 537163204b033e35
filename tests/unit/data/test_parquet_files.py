"""Rows of Parquet files are those of pyarrow, and files that are missing, truncated or changed are named."""

import gc
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from samestep.data.parquet_files import ParquetFiles
from samestep.errors import DataError, RecipeError, RunError

COUNT = 10


@contextmanager
def refused(code: str, *texts: str) -> Iterator[None]:
    """Require an error of the data with the code and the texts."""
    with pytest.raises(DataError) as caught:
        yield
    assert caught.value.code == code
    assert all(text in caught.value.value for text in texts)


def row(i: int) -> dict[str, Any]:
    return {"number": i, "text": f"text ä {i}", "list": list(range(i))}


def tables(folder: Path) -> None:
    """Write rows to files of 4, 4 and 2 rows, in groups of 3."""
    folder.mkdir()
    for number, begin in enumerate(range(0, COUNT, 4)):
        table = pyarrow.Table.from_pylist([row(i) for i in range(begin, min(begin + 4, COUNT))])
        pyarrow.parquet.write_table(table, str(folder / f"part-{number}.parquet"), row_group_size=3)


def opened(tmp_path: Path) -> ParquetFiles:
    """Return a source of files that a test may change."""
    tables(tmp_path / "rows")
    return ParquetFiles(str(tmp_path / "rows"))


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return a store in memory, which fsspec addresses as `memory://`."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("prefix", ["", "file://", "memory://"])
def test_rows_are_those_that_were_written(prefix: str, tmp_path: Path, memory: Any) -> None:
    local = opened(tmp_path)
    memory.put(str(tmp_path / "rows"), f"{tmp_path}/rows", recursive=True)
    source = ParquetFiles(f"{prefix}{tmp_path}/rows/")
    assert (source.names, source.sizes, source.fingerprint) == (local.names, local.sizes, local.fingerprint)
    places = [(file, index) for file, size in enumerate(source.sizes) for index in range(size)]
    assert len(places) == COUNT
    assert len(source.sizes) > 1
    for number in (*range(COUNT), *reversed(range(COUNT))):
        assert source.read(*places[number]) == row(number)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(*places[-1]) == row(COUNT - 1)
    with pytest.raises(IndexError):
        source.read(0, source.sizes[0])
    for files in (source, copy, local):
        files.close()


def test_files_in_the_cache_of_fsspec(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "filecache", {"cache_storage": str(tmp_path / "cache")})
    tables(tmp_path / "rows")
    memory.put(str(tmp_path / "rows"), "/rows", recursive=True)
    source = ParquetFiles("filecache::memory://rows")
    memory.store.clear()
    assert source.read(0, 0) == row(0)
    assert source.read(len(source.names) - 1, source.sizes[-1] - 1) == row(COUNT - 1)
    source.close()


def test_columns_of_parquet(tmp_path: Path) -> None:
    tables(tmp_path / "rows")
    source = ParquetFiles(str(tmp_path / "rows"), columns=["number"])
    assert source.read(1, 2) == {"number": 6}
    source.close()
    with refused("E_UNKNOWN_NAME", "part-0", "numbre"):
        ParquetFiles(str(tmp_path / "rows"), columns=["number", "numbre"])


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"a": {"b": 1, "c": {"d": 2}}, "e": 3}])
    pyarrow.parquet.write_table(table, str(tmp_path / "part.parquet"))
    source = ParquetFiles(str(tmp_path), columns=["a.c", "e"])
    assert source.read(0, 0) == {"a": {"c": {"d": 2}}, "e": 3}
    source.close()


def test_tables_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RecipeError, match="pyarrow") as error:
        ParquetFiles(str(tmp_path))
    assert error.value.code == "E_NOT_INSTALLED"


# --- faults ------------------------------------------------------------------------------------------------


def test_missing_file_is_named(tmp_path: Path) -> None:
    source = opened(tmp_path)
    (tmp_path / "rows" / source.names[1]).unlink()
    source.read(0, 0)
    with refused("E_FILE_MISSING", source.names[1]):
        source.read(1, 0)
    source.close()


def test_truncated_file_is_named(tmp_path: Path) -> None:
    source = opened(tmp_path)
    path = tmp_path / "rows" / source.names[1]
    os.truncate(path, path.stat().st_size // 2)
    with refused("E_UNREADABLE", source.names[1]):
        source.read(1, source.sizes[1] - 1)
    with refused("E_UNREADABLE", source.names[1]):
        ParquetFiles(str(tmp_path / "rows"))
    source.close()


def test_file_with_another_number_of_samples_is_named(tmp_path: Path) -> None:
    source = opened(tmp_path)
    first, last = tmp_path / "rows" / source.names[0], tmp_path / "rows" / source.names[-1]
    last.write_bytes(first.read_bytes())
    with refused("E_FILE_CHANGED", source.names[-1]):
        source.read(len(source.names) - 1, 0)
    source.close()


def test_folder_without_files_of_the_format(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(100))
    (tmp_path / "empty").mkdir()
    for address in (str(tmp_path / "empty"), str(tmp_path / "missing"), str(tmp_path / "file.bin"), "memory://missing"):
        with refused("E_FILE_MISSING", address):
            ParquetFiles(address)


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), TimeoutError("no answer"), ConnectionError("refused")]
)
def test_disk_or_network_that_fails(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    source = opened(tmp_path)
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", fail)
    for read in (lambda: source.read(0, 0), lambda: ParquetFiles(str(tmp_path / "rows"))):
        with pytest.raises(RunError, match=r"part-0\.parquet") as caught:
            read()
        assert caught.value.code == "E_IO"


def test_number_of_open_files_is_bounded(tmp_path: Path) -> None:
    for i in range(80):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(i)]), str(tmp_path / f"{i:02d}.parquet"))
    source = ParquetFiles(str(tmp_path))
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for file in range(80):
        assert source.read(file, 0) == row(file)
    assert len(os.listdir("/proc/self/fd")) - before == 64
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
