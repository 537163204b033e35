"""Sources read the files of the libraries of their formats, and name files that are missing, truncated or changed."""

import gc
import json
import os
import pickle
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.arrow import count_rows
from samestep.data.streams.formats.open import FORMATS, open_source
from samestep.data.streams.formats.webdataset import index_of_tar, parse_index, read_members
from samestep.data.streams.source import IndexedSource
from samestep.distributed.env import CACHE
from samestep.errors import DataError, InputError, RunError
from samestep.tools.pack.write_index import write_index

FILES = Path(__file__).with_name("files")
COUNT = 10
OPTIONS = {"tokens": {"length": 4}}


@contextmanager
def refused(code: str, *texts: str) -> Iterator[None]:
    """Require an error of the data with the code and the texts."""
    with pytest.raises(DataError) as caught:
        yield
    assert caught.value.code == code
    assert all(text in caught.value.value for text in texts)


def image(i: int) -> Image.Image:
    return Image.fromarray(numpy.full((2, 3, 3), i, numpy.uint8))


def mds_sample(i: int) -> dict[str, Any]:
    sample = {"number": i, "text": f"text ä {i}", "data": bytes([i] * i), "third": i / 3, "small": i}
    sample |= {"large": 10**30 + i, "json": {"k": [i, None]}}
    sample |= {"array": numpy.arange(i + 1, dtype=numpy.int16).reshape(1, -1)}
    return sample | {"matrix": numpy.full((2, 3), i, numpy.float32), "raw": image(i), "image": image(i)}


def litdata_sample(i: int) -> dict[str, Any]:
    sample = {"number": i, "text": f"text ä {i}", "third": i / 3, "flag": i % 2 == 0, "data": bytes([i] * i)}
    sample |= {"pair": (torch.full((2, 2), i), torch.arange(i + 1, dtype=torch.float32))}
    return sample | {"array": numpy.full((2, 3), i, numpy.float32), "flat": [numpy.arange(i + 1, dtype=numpy.uint16)]}


def webdataset_sample(i: int) -> dict[str, Any]:
    values = {"cls": str(i).encode(), "txt": f"text ä {i}".encode(), "seg.json": json.dumps({"k": i}).encode()}
    return {"__key__": f"sub/{i:03d}", **values}


def row(i: int) -> dict[str, Any]:
    return {"number": i, "text": f"text ä {i}", "list": list(range(i))}


def tables(folder: Path, kind: str) -> None:
    """Write rows to files of 4, 4 and 2 rows, in groups or batches of 3."""
    folder.mkdir()
    for number, begin in enumerate(range(0, COUNT, 4)):
        table = pyarrow.Table.from_pylist([row(i) for i in range(begin, min(begin + 4, COUNT))])
        path = str(folder / f"part-{number}.{kind}")
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=3)
        else:
            writer = pyarrow.ipc.new_stream if number else pyarrow.ipc.new_file  # both kinds of Arrow files
            with pyarrow.OSFile(path, "wb") as file, writer(file, table.schema) as opened:
                opened.write_table(table, max_chunksize=3)


def tokens(folder: Path) -> None:
    folder.mkdir()
    numpy.arange(17, dtype="<u2").tofile(folder / "a.bin")
    numpy.arange(100, 109, dtype="<u2").tofile(folder / "b.bin")


EXPECTED: dict[str, Any] = {
    "mds": mds_sample,
    "mds_zstd": mds_sample,
    "litdata": litdata_sample,
    "webdataset": webdataset_sample,
    "parquet": row,
    "arrow": row,
}


def opened(name: str, tmp_path: Path) -> IndexedSource[Any]:
    """Return a source of a copy of the files, which a test may change."""
    folder = tmp_path / name
    if name in ("parquet", "arrow"):
        tables(folder, name)
    elif name == "tokens":
        tokens(folder)
    else:
        shutil.copytree(FILES / name, folder)
    return open_source(name.partition("_")[0], StreamFolder(str(folder)), **OPTIONS.get(name, {}))


def same(left: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list | tuple):
        return type(left) is type(right) and all(map(same, left, right)) and len(left) == len(right)
    if isinstance(right, numpy.ndarray | torch.Tensor):
        return type(left) is type(right) and left.dtype == right.dtype and bool((left == right).all())
    if isinstance(right, Image.Image):
        return left.mode == right.mode and left.size == right.size and left.tobytes() == right.tobytes()
    return bool(left == right)


@pytest.mark.parametrize("name", EXPECTED)
def test_samples_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    places = [(file, index) for file, size in enumerate(source.sizes) for index in range(size)]
    assert len(places) == COUNT and len(source.sizes) > 1
    for number in (*range(COUNT), *reversed(range(COUNT))):
        assert same(source.read(*places[number]), EXPECTED[name](number))
    source.close()


@pytest.mark.parametrize("name", [*EXPECTED, "tokens"])
def test_pickled_source_reads_the_same(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    first = source.read(1, 0)
    copy = pickle.loads(pickle.dumps(source))
    assert same(copy.read(1, 0), first)
    assert copy.fingerprint == source.fingerprint
    with pytest.raises(IndexError):
        source.read(0, source.sizes[0])
    source.close()
    copy.close()


def test_windows_of_tokens(tmp_path: Path) -> None:
    source = opened("tokens", tmp_path)
    assert source.sizes == [4, 2]
    assert source.read(0, 3).tolist() == [12, 13, 14, 15, 16]
    assert source.read(1, 1).tolist() == [104, 105, 106, 107, 108]
    assert source.read(1, 1).dtype == torch.int64


def test_tokens_with_the_header_of_llm_c(tmp_path: Path) -> None:
    header = numpy.zeros(256, "<i4")
    header[:3] = 20240801, 7, 9
    (tmp_path / "a.bin").write_bytes(header.tobytes() + numpy.arange(9, dtype="<u4").tobytes())
    folder = StreamFolder(str(tmp_path))
    source = open_source("tokens", folder, length=4, dtype="uint32", header="llm.c")
    assert [source.read(0, i).tolist() for i in range(source.sizes[0])] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    with refused("E_UNREADABLE", "a.bin"):
        open_source("tokens", folder, length=4, dtype="uint16", header="llm.c").read(0, 0)


@pytest.mark.parametrize(("header", "size"), [("none", 3), ("llm.c", 1000), ("llm.c", 1025)])
def test_short_token_file_that_is_damaged(header: str, size: int, tmp_path: Path) -> None:
    """The file has no whole window, so no sample would open it."""
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with refused("E_UNREADABLE", "a.bin"):
        open_source("tokens", StreamFolder(str(tmp_path)), length=4, header=header)


def test_blocks_of_litdata_tokens() -> None:
    source = open_source("litdata", StreamFolder(str(FILES / "litdata_tokens")), block_size=4)
    assert source.sizes == [7, 7]
    assert source.read(1, 6).tolist() == [54, 55, 56, 57]
    source.close()


def test_columns_of_tables(tmp_path: Path) -> None:
    for kind in ("parquet", "arrow"):
        tables(tmp_path / kind, kind)
        source = open_source(kind, StreamFolder(str(tmp_path / kind)), columns=["number"])
        assert source.read(1, 2) == {"number": 6}
        source.close()


@pytest.mark.slow
def test_files_of_hugging_face_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread
    datasets.Dataset.from_list([row(i) for i in range(COUNT)]).save_to_disk(tmp_path / "saved", num_shards=2)
    source = open_source("arrow", StreamFolder(str(tmp_path / "saved")))
    assert [source.read(file, i) for file in range(2) for i in range(5)] == [row(i) for i in range(COUNT)]
    source.close()


@pytest.mark.slow
def test_caches_of_hugging_face_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    folder = tmp_path / "saved" / "train"
    datasets.Dataset.from_list([row(i) for i in range(COUNT)]).save_to_disk(folder)
    saved = datasets.load_from_disk(folder)
    saved.map(lambda values: {"number": values["number"] * 10})
    saved.shuffle(seed=0)
    assert len(list(folder.glob("cache-*.arrow"))) == 2
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path / "saved"), "/hugging", recursive=True)
    for address in (str(folder), str(tmp_path / "saved"), "memory://hugging", "memory://hugging/train"):
        source = open_source("arrow", StreamFolder(address))
        assert source.sizes == [COUNT]
        assert source.read(0, 3) == row(3)
        source.close()
    assert write_index(folder, "arrow", lambda line: None).samples == COUNT
    system.rm("/hugging", recursive=True)


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"_data_files": [{"filename": "part-0.arrow"}, {"filename": "lost.arrow"}]}, "E_FILE_MISSING"),
        ({"_data_files": [{}]}, "E_UNREADABLE"),
        ({"_data_files": 1}, "E_UNREADABLE"),
        ([], "E_UNREADABLE"),
    ],
)
def test_state_of_a_saved_dataset_that_cannot_be_used(state: Any, code: str, tmp_path: Path) -> None:
    tables(tmp_path / "saved", "arrow")
    (tmp_path / "saved" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with refused(code):
        open_source("arrow", StreamFolder(str(tmp_path / "saved")))


@pytest.mark.parametrize(("state", "sizes"), [('{"step": 3}', [4, 4, 2]), ('{"_data_files": []}', [])])
def test_state_without_files(state: str, sizes: list[int], tmp_path: Path) -> None:
    tables(tmp_path / "saved", "arrow")
    (tmp_path / "saved" / "state.json").write_text(state, encoding="utf-8")
    assert open_source("arrow", StreamFolder(str(tmp_path / "saved"))).sizes == sizes


def test_index_of_a_tar_file_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    source = opened("webdataset", tmp_path)
    for tar in (tmp_path / "webdataset").iterdir():
        tar.rename(tar.with_suffix(".moved"))  # so a second scan would fail
    monkeypatch.setattr(StreamFolder, "use", lambda self, file, function: function(tar_path(self, file.name)))
    for reader in (source, pickle.loads(pickle.dumps(source))):
        assert same(reader.read(1, 0), webdataset_sample(4))
        reader.close()


def test_index_of_a_tar_file_is_not_that_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have equal relative paths, sizes and modification times; then the first is replaced."""
    names = ("a.txt", "b.txt", "c.txt")
    changed = {"one": (300, 100, 100), "two": (100, 100, 300), "one again": (100, 300, 100)}
    for place, sizes in changed.items():
        folder = tmp_path / place.split()[0] / "tars"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new").write_bytes(tar_of(*names, sizes=sizes))
        os.utime(folder / "new", (0, 0))
        (folder / "new").replace(folder / "part.tar")
        monkeypatch.chdir(folder.parent)
        source = open_source("webdataset", StreamFolder("tars"))
        assert [len(source.read(0, number)["txt"]) for number in range(3)] == list(sizes)
        source.close()


def tar_path(folder: StreamFolder, name: str) -> Path:
    return (Path(folder.address) / name).with_suffix(".moved")


def test_hidden_files_and_linked_folders_of_a_format(tmp_path: Path) -> None:
    for name in ("part-0.tar", "._part-0.tar", ".old/part-1.tar"):
        (tmp_path / "tars" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tars" / name).write_bytes(INTACT)
    for address in (str(tmp_path / "tars"), f"file://{tmp_path}/tars"):
        assert [file.name for file in StreamFolder(address).find("*.tar")] == ["part-0.tar"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "part-2.tar").write_bytes(INTACT)
    (tmp_path / "tars" / "link").symlink_to(tmp_path / "more")
    assert open_source("webdataset", StreamFolder(str(tmp_path / "tars"))).names == ["link/part-2.tar", "part-0.tar"]
    (tmp_path / "tars" / "part-3.tar").symlink_to(tmp_path / "none")
    with refused("E_FILE_MISSING", "part-3.tar"):
        open_source("webdataset", StreamFolder(str(tmp_path / "tars")))


# --- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXPECTED, "tokens"])
def test_missing_file_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    (tmp_path / name / source.names[1]).unlink()
    source.read(0, 0)
    with refused("E_FILE_MISSING", source.names[1]):
        source.read(1, 0)
    source.close()


@pytest.mark.parametrize("name", [*EXPECTED, "tokens"])
def test_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    path = tmp_path / name / source.names[1]
    os.truncate(path, path.stat().st_size - 3)
    with refused("E_FILE_CHANGED", source.names[1]):
        source.read(1, source.sizes[1] - 1)
    source.close()


@pytest.mark.parametrize("name", [*EXPECTED, "tokens"])
def test_changed_byte_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    path = tmp_path / name / source.names[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, (1, 1))  # a change within the resolution of the clock would be a change of the time, too
    with refused("E_FILE_CHANGED", source.names[1]):
        source.read(1, 0)
    source.close()


@pytest.mark.parametrize("name", ["mds", "litdata", "webdataset", "tokens"])
def test_file_that_is_truncated_while_it_is_open(name: str, tmp_path: Path) -> None:
    source = opened(name, tmp_path)
    source.read(1, 0)
    os.truncate(tmp_path / name / source.names[1], 16)
    with refused("E_UNREADABLE", source.names[1]):
        source.read(1, source.sizes[1] - 1)
    source.close()


@pytest.mark.parametrize(
    ("index", "old", "new"),
    [
        ("mds", '"version": 2', '"version": 3'),
        ("mds", '"json"', '"pkl"'),
        ("mds", "shard.00001.mds", "../shard.00001.mds"),
        ("mds", '"shards"', '"other"'),
        ("mds", "{", ""),
        ("litdata", '"compression": null', '"compression": "zstd"'),
        ("litdata", '"bytes"', '"pickle"'),
        ("litdata", '"chunks"', '"other"'),
    ],
)
def test_index_that_cannot_be_used(index: str, old: str, new: str, tmp_path: Path) -> None:
    shutil.copytree(FILES / index, tmp_path / index)
    path = tmp_path / index / "index.json"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with refused("E_UNREADABLE", "index.json"):
        open_source(index, StreamFolder(str(tmp_path / index)))


def test_tar_that_ends_within_a_member(tmp_path: Path) -> None:
    shutil.copytree(FILES / "webdataset", tmp_path / "tars")
    path = tmp_path / "tars" / "part-01.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    os.truncate(path, last.offset_data + 1)
    with refused("E_UNREADABLE", "part-01.tar"):
        open_source("webdataset", StreamFolder(str(tmp_path / "tars")))


def tar_of(*names: str, sizes: Sequence[int] | None = None) -> bytes:
    """Return a tar file of members that occupy 1,024 bytes each, with padding to 10,240 bytes."""
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 300 if sizes is None else sizes[number]
            tar.addfile(info, BytesIO(bytes([number + 1]) * info.size))
    return file.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


INTACT = tar_of("a.jpg", "a.cls", "b.jpg", "b.cls", "c.jpg", "c.cls")


@pytest.mark.parametrize("size", [len(INTACT), 6 * 1024 + 1024, 6 * 1024 + 512])
def test_tar_with_any_padding(size: int, tmp_path: Path) -> None:
    assert len(INTACT) == 10_240
    (tmp_path / "part.tar").write_bytes(INTACT[:size])
    source = open_source("webdataset", StreamFolder(str(tmp_path)))
    assert source.sizes == [3]
    assert source.read(0, 2) == {"__key__": "c", "jpg": bytes([5]) * 300, "cls": bytes([6]) * 300}
    source.close()


DAMAGED: dict[str, tuple[bytes, str]] = {
    "a byte of a header has changed": (flipped(INTACT, 2 * 1024 + 10), "after a.cls"),
    "a byte of the first header has changed": (flipped(INTACT, 10), "part.tar"),
    "cut inside a header": (INTACT[: 2 * 1024 + 100], "after a.cls"),
    "cut between members": (INTACT[: 2 * 1024], "after a.cls"),
    "cut before the end": (INTACT[: 6 * 1024], "after c.cls"),
    "two archives": (INTACT + INTACT, "6,144"),
    "two archives without padding": (INTACT[: 6 * 1024 + 512] + INTACT, "6,144"),
    "equal names": (tar_of("x.jpg", "x.cls", "x.jpg", "x.cls", "y.jpg", "y.cls", "y.jpg", "y.cls"), "x.jpg"),
    "equal names but for the case": (tar_of("x.jpg", "y.jpg", "y.JPG"), "y.JPG"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_tar_that_would_lose_samples(fault: str, tmp_path: Path) -> None:
    data, cause = DAMAGED[fault]
    (tmp_path / "part.tar").write_bytes(data)
    for read in (
        lambda: open_source("webdataset", StreamFolder(str(tmp_path))),
        lambda: write_index(tmp_path, "webdataset", lambda line: None),
    ):
        with refused("E_UNREADABLE", "part.tar", cause):
            read()


def test_index_of_a_tar_file_with_equal_names(tmp_path: Path) -> None:
    (tmp_path / "part.tar").write_bytes(INTACT)
    text = index_of_tar(read_members(tmp_path / "part.tar"))
    assert len(parse_index(text)) == 3
    with pytest.raises(ValueError, match=r"b\.jpg"):
        parse_index(text.replace("cls 3584 300 b.cls", "jpg 3584 300 b.jpg"))


@pytest.mark.parametrize("kind", FORMATS)
def test_file_in_place_of_a_folder(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(100))
    with refused("E_FILE_MISSING", "file.bin"):
        open_source(kind, StreamFolder(str(tmp_path / "file.bin")), **OPTIONS.get(kind, {}))


def disk_error(*arguments: Any, **options: Any) -> Any:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("kind", "function"),
    [("tokens", "pathlib.Path.read_bytes"), ("parquet", "pathlib.Path.open"), ("webdataset", "pathlib.Path.open")],
)
def test_disk_that_fails_at_the_start(
    kind: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    opened(kind, tmp_path).close()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    monkeypatch.setattr(function, disk_error)
    with pytest.raises(RunError, match=r"Input/output error") as caught:
        open_source(kind, StreamFolder(str(tmp_path / kind)), **OPTIONS.get(kind, {}))
    assert caught.value.code == "E_IO"


@pytest.mark.parametrize(
    ("kind", "function", "error"),
    [
        ("arrow", "pyarrow.ipc.open_file", OSError(5, "Input/output error")),
        ("parquet", "pyarrow.parquet.read_metadata", OSError(5, "Input/output error")),
        ("parquet", "pyarrow.parquet.read_metadata", TimeoutError("Input/output error")),
    ],
)
def test_disk_or_network_that_fails_while_rows_are_counted(
    kind: str, function: str, error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    tables(tmp_path / kind, kind)
    monkeypatch.setattr(function, fail)
    with pytest.raises(RunError, match=rf"part-0\.{kind}.*Input/output error") as caught:
        open_source(kind, StreamFolder(str(tmp_path / kind)))
    assert caught.value.code == "E_IO"


def test_arrow_file_that_another_process_has_removed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # `StreamFolder.use` copies it again
        count_rows(tmp_path / "removed.arrow")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_unknown_column_is_named(kind: str, tmp_path: Path) -> None:
    tables(tmp_path / kind, kind)
    for file in (0, 1):
        source = open_source(kind, StreamFolder(str(tmp_path / kind)), columns=["number", "numbre"])
        with pytest.raises(DataError, match=rf"part-{file}.*numbre") as caught:
            source.read(file, 0)
        assert caught.value.code == "E_COLUMN"


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"a": {"b": 1, "c": {"d": 2}}, "e": 3}])
    pyarrow.parquet.write_table(table, str(tmp_path / "part.parquet"))
    source = open_source("parquet", StreamFolder(str(tmp_path)), columns=["a.c", "e"])
    assert source.read(0, 0) == {"a": {"c": {"d": 2}}, "e": 3}
    source.close()


def test_compressed_mds_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened("mds_zstd", tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="compressed MDS files") as caught:
        source.read(0, 0)
    assert caught.value.code == "E_NOT_INSTALLED"


@pytest.mark.parametrize(
    "options",
    [
        {"tries": 0},
        {"tries": 2.5},
        {"tries": True},
        {"cache_gb": "large"},
        {"cache_gb": 0},
        {"cache_gb": float("nan")},
        {"cache_gb": float("inf")},
        {"storage_options": None},
        {"storage_options": [1]},
    ],
)
def test_options_of_a_store(options: dict[str, Any]) -> None:
    for address in ("folder", "memory://folder"):
        with pytest.raises(InputError, match=next(iter(options))) as caught:
            StreamFolder(address, **options)
        assert caught.value.code == "E_VALUE"


@pytest.mark.parametrize("kind", FORMATS)
def test_folder_without_files_of_the_format(kind: str, tmp_path: Path) -> None:
    with refused("E_FILE_MISSING"):
        open_source(kind, StreamFolder(str(tmp_path)), **OPTIONS.get(kind, {}))


@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("mdss", {}, "E_UNKNOWN_NAME"),
        ("tokens", {}, "E_MISSING_KEY"),
        ("tokens", {"length": 0}, "E_VALUE"),
        ("tokens", {"length": "4"}, "E_VALUE"),
        ("tokens", {"length": 4.0}, "E_VALUE"),
        ("tokens", {"length": True}, "E_VALUE"),
        ("mds", {"length": 4}, "E_UNKNOWN_OPTION"),
    ],
)
def test_options_of_a_format(kind: str, options: dict[str, Any], code: str, tmp_path: Path) -> None:
    with refused(code):
        open_source(kind, StreamFolder(str(tmp_path)), **options)


def test_number_of_open_files_is_bounded(tmp_path: Path) -> None:
    for i in range(80):
        numpy.arange(5, dtype="<u2").tofile(tmp_path / f"{i:02d}.bin")
    source = open_source("tokens", StreamFolder(str(tmp_path)), length=4)
    gc.collect()  # files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    for file in range(80):
        assert source.read(file, 0).tolist() == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) - before == 64
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
