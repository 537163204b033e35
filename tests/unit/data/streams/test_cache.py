"""Files of object stores: retries, checksums, and a bounded cache that processes share."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from helpers.object_store import Server
from samestep.data.streams.cache import FileCache, _Background
from samestep.data.streams.data_file import DataFile
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.open import open_source
from samestep.distributed.env import CACHE
from samestep.errors import DataError, InputError, RunError

FILES = Path(__file__).with_name("files")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(FILES) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# fsspec keeps a thread for web servers, and each test needs a cache of its own: so these are processes.
READ = """
import json, sys, time
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.open import open_source
from samestep.errors import SamestepError
address, tries, cache_gb = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
try:
    source = open_source("mds", StreamFolder(address, tries=tries, cache_gb=cache_gb))
    numbers = [source.read(f, i)["number"] for f, n in enumerate(source.sizes) for i in range(n)]
    print(json.dumps({"numbers": numbers}))
except SamestepError as error:
    print(json.dumps({"code": error.code, "value": error.value}))
"""


def reader(server: Server, cache: Path, *, tries: int = 4, cache_gb: float = 1) -> subprocess.Popen[str]:
    command = [
        "env",
        f"{CACHE}={cache}",
        sys.executable,
        "-c",
        READ,
        f"{server.address}/mds",
        str(tries),
        str(cache_gb),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    answer: dict[str, Any] = json.loads(output)
    return answer


def names(cache: Path, part: str = "files") -> list[str]:
    return sorted(path.name for path in cache.glob(f"*/{part}/*"))


@pytest.mark.slow
def test_failures_of_a_server_are_repeated(server: Server, tmp_path: Path) -> None:
    faults = {"mds/index.json": [503], "mds/shard.00001.mds": [503, 503], "mds/shard.00002.mds": [206]}
    server.faults = {**faults, "mds/shard.00003.mds": [203]}
    assert result(reader(server, tmp_path)) == {"numbers": list(range(10))}
    assert [server.requests[f"mds/shard.0000{i}.mds"] for i in range(5)] == [1, 3, 2, 2, 1]
    assert len(names(tmp_path)) == 5 and not names(tmp_path, "reserved")
    server.requests.clear()  # a later run uses the copies
    assert result(reader(server, tmp_path)) == {"numbers": list(range(10))}
    assert not any(name.endswith(".mds") for name in server.requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "code", "cause"),
    [([503] * 9, "E_IO", "503"), ([206] * 9, "E_IO", "2 times"), ([203] * 9, "E_FILE_CHANGED", "checksum")],
)
def test_last_failure_names_file_tries_and_cause(
    faults: list[int], code: str, cause: str, server: Server, tmp_path: Path
) -> None:
    server.faults = {"mds/shard.00001.mds": faults}
    error = result(reader(server, tmp_path, tries=2))
    assert error["code"] == code
    assert f"{server.address}/mds/shard.00001.mds" in error["value"] and cause in error["value"]
    assert server.requests["mds/shard.00001.mds"] == 2
    assert len(names(tmp_path)) == 1 and not names(tmp_path, "reserved")


@pytest.mark.slow
def test_processes_share_a_cache(server: Server, tmp_path: Path) -> None:
    readers = [reader(server, tmp_path) for _ in range(2)]
    assert [result(process) for process in readers] == [{"numbers": list(range(10))}] * 2
    assert [server.requests[f"mds/shard.0000{i}.mds"] for i in range(5)] == [1] * 5


@pytest.mark.slow
def test_processes_share_a_cache_of_two_files(server: Server, tmp_path: Path) -> None:
    readers = [reader(server, tmp_path, cache_gb=2.2e-6) for _ in range(2)]
    largest = 0
    while any(process.poll() is None for process in readers):
        with suppress(FileNotFoundError):  # removed meanwhile
            largest = max(largest, sum(path.stat().st_size for path in tmp_path.glob("*/files/*")))
        time.sleep(0.001)
    assert [result(process) for process in readers] == [{"numbers": list(range(10))}] * 2
    assert 0 < largest <= 2200
    assert sum(path.stat().st_size for path in tmp_path.glob("*/files/*")) <= 2200


# --- in this process, with a store in memory -----------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(CACHE, str(tmp_path))
    system = fsspec.filesystem("memory")
    for i in range(5):
        system.pipe(f"/data/{i}.bin", bytes([i]) * 1000)
    yield system
    system.rm("/data", recursive=True)


def used(folder: StreamFolder, file: DataFile) -> bytes:
    return folder.use(file, Path.read_bytes)


def test_least_recently_used_copy_is_removed(store: Any, tmp_path: Path) -> None:
    folder = StreamFolder("memory://data", cache_gb=3e-6)
    files = folder.find("*.bin")
    for i in (0, 1, 2, 0, 3):
        assert used(folder, files[i]) == bytes([i]) * 1000
    assert [name.partition("-")[2] for name in sorted(names(tmp_path), key=lambda n: n[-5])] == [
        "0.bin",
        "2.bin",
        "3.bin",
    ]


def test_file_larger_than_the_cache(store: Any) -> None:
    folder = StreamFolder("memory://data", cache_gb=9e-7)
    with pytest.raises(InputError) as caught:
        used(folder, folder.find("*.bin")[0])
    assert caught.value.code == "E_VALUE" and "0.bin" in caught.value.value


def test_file_that_is_missing_in_the_store(store: Any) -> None:
    folder = StreamFolder("memory://data")
    files = folder.find("*.bin")
    store.rm("/data/1.bin")
    with pytest.raises(DataError) as caught:
        used(folder, files[1])
    assert caught.value.code == "E_FILE_MISSING" and "memory://data/1.bin" in caught.value.value


def test_file_that_has_changed_in_the_store(store: Any) -> None:
    folder = StreamFolder("memory://data", tries=1)
    file = folder.find("*.bin")[1]
    store.pipe("/data/1.bin", bytes(900))
    with pytest.raises(DataError) as caught:
        used(folder, file)
    assert caught.value.code == "E_FILE_CHANGED" and "memory://data/1.bin" in caught.value.value
    store.pipe("/data/1.bin", bytes(1000))  # another version of the same size is another copy
    assert used(folder, folder.find("*.bin")[1]) == bytes(1000)


def test_damaged_copy_is_replaced(store: Any, tmp_path: Path) -> None:
    folder = StreamFolder("memory://data")
    file = folder.find("*.bin")[1]
    used(folder, file)
    next(tmp_path.glob("*/files/*")).write_bytes(b"short")
    assert used(folder, file) == bytes([1]) * 1000


def test_rest_of_a_killed_process_is_removed(store: Any, tmp_path: Path) -> None:
    folder = StreamFolder("memory://data", cache_gb=1.5e-6)
    files = folder.find("*.bin")
    used(folder, files[0])
    copy = next(tmp_path.glob("*/files/*"))
    (copy.parents[1] / "reserved" / "0123-9.bin").write_bytes(bytes(1400))
    (copy.parents[1] / "reserved" / "0123-9.bin.partial").write_bytes(bytes(700))
    assert used(folder, files[1]) == bytes([1]) * 1000
    assert not names(tmp_path, "reserved")


def prefetch_ends() -> None:
    deadline = time.monotonic() + 20
    while any(thread.name == "samestep-prefetch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prefetch_copies_in_the_background(store: Any, tmp_path: Path) -> None:
    folder = StreamFolder("memory://data")
    files = folder.find("*.bin")
    folder.prefetch([files[3], files[1], DataFile("9.bin", 1000)])  # the last one does not exist: its read reports it
    prefetch_ends()
    assert len(names(tmp_path)) == 2
    store.rm("/data/3.bin")
    assert used(folder, files[3]) == bytes([3]) * 1000


def denied(*arguments: Any, **options: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


def test_copy_of_another_account(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StreamFolder("memory://data")
    file = folder.find("*.bin")[1]
    used(folder, file)
    store.rm("/data/1.bin")
    monkeypatch.setattr(os, "utime", denied)
    assert used(folder, file) == bytes([1]) * 1000


def test_prefetch_continues_after_an_error_of_the_disk(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StreamFolder("memory://data")
    files, fetch = folder.find("*.bin"), FileCache._fetch
    monkeypatch.setattr(
        FileCache,
        "_fetch",
        lambda self, file, **options: denied() if file.name < "3" else fetch(self, file, **options),
    )
    folder.prefetch(files)
    prefetch_ends()
    assert [name.partition("-")[2] for name in sorted(names(tmp_path), key=lambda n: n[-5])] == ["3.bin", "4.bin"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_ends_with_an_error_is_replaced() -> None:
    copied: list[str] = []

    def copy(file: DataFile) -> None:
        if file.name == "damaged":
            raise RuntimeError(file.name)
        copied.append(file.name)

    background = _Background(copy)
    background.replace([DataFile("damaged", 1)] * 2)
    prefetch_ends()
    background.replace([DataFile("a", 1), DataFile("b", 1)])
    prefetch_ends()
    assert sorted(copied) == ["a", "b"]


@pytest.mark.parametrize(("method", "verb"), [("find", "list"), ("cat_file", "read"), ("open", "open")])
def test_store_without_access(method: str, verb: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StreamFolder("memory://data")
    calls = {
        "find": lambda: folder.find("*.bin"),
        "cat_file": lambda: folder.read("0.bin"),
        "open": lambda: folder.open(DataFile("0.bin", 1000)).__enter__(),
    }
    with monkeypatch.context() as context:
        context.setattr(type(store), method, denied)
        with pytest.raises(RunError, match=rf"^{verb} of memory://data.*not permitted") as caught:
            calls[method]()
    assert caught.value.code == "E_IO"


def test_disk_that_cannot_be_written(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StreamFolder("memory://data").find("*.bin")[0]
    (tmp_path / "file").write_text("in place of the folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    folder = StreamFolder("memory://data")
    with pytest.raises(RunError) as caught:
        used(folder, file)
    assert caught.value.code == "E_IO"


@pytest.mark.parametrize("kind", ["litdata", "webdataset", "mds"])
def test_formats_in_a_store(kind: str, store: Any, tmp_path: Path) -> None:
    for path in (FILES / kind).iterdir():
        store.pipe(f"/data/{kind}/{path.name}", path.read_bytes())
    source = open_source(kind, StreamFolder(f"memory://data/{kind}"))
    local = open_source(kind, StreamFolder(str(FILES / kind)))
    assert source.sizes == local.sizes and source.names == local.names and source.fingerprint == local.fingerprint
    for file in range(len(source.sizes)):
        samples = [{k: v for k, v in s.read(file, 0).items() if k not in ("raw", "image")} for s in (source, local)]
        assert str(samples[0]) == str(samples[1])
    source.close()
    local.close()
