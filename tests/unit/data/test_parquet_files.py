"""Sources read the files of the libraries of their formats, and name files that are missing, truncated or changed."""

import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from samestep.data.sample_files import SampleFiles
from samestep.data.stream_formats import ParquetFiles, TokenFiles
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


def tokens(folder: Path) -> None:
    folder.mkdir()
    numpy.arange(17, dtype="<u2").tofile(folder / "a.bin")
    numpy.arange(100, 109, dtype="<u2").tofile(folder / "b.bin")


def token_files(address: str) -> TokenFiles:
    return TokenFiles(address, length=4)


def token_row(i: int) -> torch.Tensor:
    first = 4 * i if i < 4 else 100 + 4 * (i - 4)
    return torch.arange(first, first + 5)


OPEN: dict[str, Callable[[str], SampleFiles]] = {
    "parquet": ParquetFiles,
    "tokens": token_files,
}
EXPECTED: dict[str, tuple[int, Callable[[int], Any]]] = {
    "parquet": (COUNT, row),
    "tokens": (6, token_row),
}


def write(name: str, folder: Path) -> None:
    if name == "tokens":
        tokens(folder)
    else:
        tables(folder)


def opened(name: str, tmp_path: Path) -> SampleFiles:
    """Return a source of files that a test may change."""
    write(name, tmp_path / name)
    return OPEN[name](str(tmp_path / name))


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(right, torch.Tensor) else bool(left == right)


@pytest.fixture
def memory() -> Iterator[Any]:
    """Return a store in memory, which fsspec addresses as `memory://`."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("prefix", ["", "file://", "memory://"])
@pytest.mark.parametrize("name", EXPECTED)
def test_samples_are_those_that_were_written(name: str, prefix: str, tmp_path: Path, memory: Any) -> None:
    local = opened(name, tmp_path)
    memory.put(str(tmp_path / name), f"{tmp_path}/{name}", recursive=True)
    source = OPEN[name](f"{prefix}{tmp_path}/{name}/")
    assert (source.names, source.sizes, source.fingerprint) == (local.names, local.sizes, local.fingerprint)
    places = [(file, index) for file, size in enumerate(source.sizes) for index in range(size)]
    count, sample = EXPECTED[name]
    assert len(places) == count
    assert len(source.sizes) > 1
    for number in (*range(count), *reversed(range(count))):
        assert same(source.read(*places[number]), sample(number))
    copy = pickle.loads(pickle.dumps(source))
    assert same(copy.read(*places[-1]), sample(count - 1))
    with pytest.raises(IndexError):
        source.read(0, source.sizes[0])
    for files in (source, copy, local):
        files.close()


@pytest.mark.parametrize("name", ["parquet", "tokens"])
def test_files_in_the_cache_of_fsspec(name: str, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "filecache", {"cache_storage": str(tmp_path / "cache")})
    write(name, tmp_path / name)
    memory.put(str(tmp_path / name), f"/{name}", recursive=True)
    source = OPEN[name](f"filecache::memory://{name}")
    memory.store.clear()
    count, sample = EXPECTED[name]
    assert same(source.read(0, 0), sample(0))
    assert same(source.read(len(source.names) - 1, source.sizes[-1] - 1), sample(count - 1))
    source.close()


def test_tokens_with_the_header_of_llm_c(tmp_path: Path) -> None:
    header = numpy.zeros(256, "<i4")
    header[:3] = 20240801, 7, 9
    (tmp_path / "a.bin").write_bytes(header.tobytes() + numpy.arange(9, dtype="<u4").tobytes())
    source = TokenFiles(str(tmp_path), length=4, dtype="uint32", header="llm.c")
    assert [source.read(0, i).tolist() for i in range(source.sizes[0])] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    source.close()
    with refused("E_UNREADABLE", "a.bin"):
        TokenFiles(str(tmp_path), length=4, dtype="uint16", header="llm.c")


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


@pytest.mark.parametrize("name", EXPECTED)
def test_missing_file_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    (tmp_path / name / source.names[1]).unlink()
    source.read(0, 0)
    with refused("E_FILE_MISSING", source.names[1]):
        source.read(1, 0)
    source.close()


@pytest.mark.parametrize("name", EXPECTED)
def test_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    path = tmp_path / name / source.names[1]
    os.truncate(path, path.stat().st_size // 2)
    with refused("E_UNREADABLE", source.names[1]):
        source.read(1, source.sizes[1] - 1)
    with refused("E_UNREADABLE", source.names[1]):
        OPEN[name](str(tmp_path / name))
    source.close()


@pytest.mark.parametrize("name", EXPECTED)
def test_file_with_another_number_of_samples_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    first, last = tmp_path / name / source.names[0], tmp_path / name / source.names[-1]
    last.write_bytes(first.read_bytes())
    with refused("E_FILE_CHANGED", source.names[-1]):
        source.read(len(source.names) - 1, 0)
    source.close()


@pytest.mark.parametrize("name", EXPECTED)
def test_folder_without_files_of_the_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(100))
    (tmp_path / "empty").mkdir()
    for address in (str(tmp_path / "empty"), str(tmp_path / "missing"), str(tmp_path / "file.bin"), "memory://missing"):
        with refused("E_FILE_MISSING", address):
            OPEN[name](address)


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), TimeoutError("no answer"), ConnectionError("refused")]
)
def test_disk_or_network_that_fails(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    source = opened("tokens", tmp_path)
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", fail)
    for read in (lambda: source.read(0, 0), lambda: OPEN["tokens"](str(tmp_path / "tokens"))):
        with pytest.raises(RunError, match=r"a\.bin") as caught:
            read()
        assert caught.value.code == "E_IO"


def test_number_of_open_files_is_bounded(tmp_path: Path) -> None:
    for i in range(80):
        numpy.arange(5, dtype="<u2").tofile(tmp_path / f"{i:02d}.bin")
    source = token_files(str(tmp_path))
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for file in range(80):
        assert source.read(file, 0).tolist() == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) - before == 64
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
