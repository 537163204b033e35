"""`samestep pack` writes files that MosaicML Streaming would write, and continues after a kill with the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from samestep.cli.main import main
from samestep.data.streams.folder import StreamFolder
from samestep.data.streams.formats.open import open_source
from samestep.errors import EXIT_DONE, EXIT_INPUT, DataError
from samestep.tools.pack.pack import pack
from samestep.tools.pack.samples import samples_of

FILES = Path(__file__).parents[1] / "unit" / "data" / "streams" / "files"
SOURCE = """
import os, signal
from pathlib import Path
import numpy

def plain(count=10):
    for i in range(count):
        if Path(f"kill-{i}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        text = "changed" if Path(f"change-{i}").exists() else f"text \\u00e4 {i}"
        yield {"number": i, "text": text, "third": i / 3, "array": numpy.arange(i + 1, dtype=numpy.int64)}

def nothing():
    return []

def mixed():
    yield {"a": 1}
    yield {"a": "text"}

def other_columns():
    yield {"a": 1}
    yield {"b": 1}

def number():
    return 1
"""
COMMAND = ("pack", "packed_source:plain", "out", "--file-size", "700")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "packed_source.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "packed_source", raising=False)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".mds", ".json")}


def read_all(folder: Path, kind: str = "mds", **options: Any) -> list[Any]:
    source = open_source(kind, StreamFolder(str(folder)), **options)
    samples = [source.read(file, i) for file, size in enumerate(source.sizes) for i in range(size)]
    source.close()
    return samples


def code_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.partition("[")[2].partition("]")[0]


def test_files_are_those_of_mosaicml_streaming(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == EXIT_DONE
    answer = json.loads(capsys.readouterr().out)
    assert (answer["samples"], answer["files"], answer["kept_samples"]) == (10, 2, 0)
    packed, original = contents(place / "out"), contents(FILES / "mds_plain")
    assert packed.pop("pack.json")
    assert packed == original


@pytest.mark.slow
def test_command_continues_after_a_kill(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "samestep", *COMMAND, "--option", "count=40"]
    (place / "kill-33").touch()
    killed = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    partial = contents(place / "out")
    assert "index.json" not in partial and len(partial) > 3
    (place / "out" / ".shard.00009.mds-1-00").write_bytes(b"rest of a file that was not complete")
    (place / "kill-33").unlink()
    assert main([*COMMAND, "--option", "count=40", "--json"]) == EXIT_DONE
    kept = json.loads(capsys.readouterr().out)["kept_samples"]
    assert 0 < kept < 33
    shutil.move(place / "out", place / "killed")
    assert main([*COMMAND, "--option", "count=40"]) == EXIT_DONE
    assert contents(place / "killed") == contents(place / "out")
    assert not list((place / "killed").glob(".shard*"))


def test_complete_and_damaged_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND]) == EXIT_DONE
    before = contents(place / "out")
    capsys.readouterr()
    assert main([*COMMAND, "--json"]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["kept_samples"] == 10
    os.truncate(place / "out" / "shard.00001.mds", 30)
    assert main([*COMMAND, "--json"]) == EXIT_DONE
    assert 0 < json.loads(capsys.readouterr().out)["kept_samples"] < 10
    assert contents(place / "out") == before


def test_source_that_has_changed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND]) == EXIT_DONE
    journal = json.loads((place / "out" / "pack.json").read_text(encoding="utf-8"))
    (place / f"change-{journal['files'][0]['samples'] - 1}").touch()
    (place / "out" / "shard.00001.mds").unlink()
    assert main([*COMMAND]) == EXIT_INPUT
    assert code_of(capsys) == "E_DATA"


@pytest.mark.parametrize("lines", ["a\nb\nc\nd\n", "a\nb\n", "a\nb\nd\n", ""])
def test_source_that_has_changed_after_the_last_file(
    lines: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["pack", "lines.txt", "out"]
    (place / "lines.txt").write_text("a\nb\nc\n", encoding="utf-8")
    assert main(command) == main(command) == EXIT_DONE
    (place / "lines.txt").write_text(lines, encoding="utf-8")
    assert main(command) == EXIT_INPUT
    assert code_of(capsys) == "E_DATA"
    assert len(read_all(place / "out")) == 3


def test_new_folder_of_a_failed_command_is_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "empty.txt").touch()
    assert main(["pack", "empty.txt", "out"]) == EXIT_INPUT
    assert code_of(capsys) == "E_EMPTY_DATASET"
    assert not (place / "out").exists()
    (place / "out").mkdir()
    assert main(["pack", "empty.txt", "out"]) == EXIT_INPUT
    assert (place / "out").exists()


@pytest.mark.parametrize("source", ["reviews.csv", "nope"])
def test_unknown_source(source: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", source, "out"]) == EXIT_INPUT
    err = capsys.readouterr().err
    assert f"source {source!r} is unknown [E_UNKNOWN_NAME]" in err
    assert all(name in err for name in (".jsonl", ".txt", "--from FORMAT", "module:function"))
    assert not (place / "out").exists()


def test_destination_after_options(place: Path) -> None:
    (place / "lines.txt").write_text("a\n", encoding="utf-8")
    assert main(["pack", "lines.txt", "--file-size", "1KiB", "out"]) == EXIT_DONE
    assert len(read_all(place / "out")) == 1


def test_index_that_was_removed(place: Path) -> None:
    assert main([*COMMAND]) == EXIT_DONE
    before = contents(place / "out")
    (place / "out" / "index.json").unlink()
    assert main([*COMMAND]) == EXIT_DONE
    assert contents(place / "out") == before


def pack_values(folder: Path, *values: Any) -> list[Any]:
    """Pack samples with one column, and return its values."""
    samples = [{"x": value} for value in values]
    pack(
        lambda first: iter(samples[first:]),
        folder,
        source="test",
        encodings={},
        file_bytes=1 << 20,
        report=lambda line: None,
    )
    return [sample["x"] for sample in read_all(folder)]


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">f4", ">f8", "<i8"])
def test_arrays_of_any_byte_order(dtype: str, tmp_path: Path) -> None:
    values = numpy.arange(6).reshape(2, 3).astype(dtype)
    (packed,) = pack_values(tmp_path / "out", values)
    assert packed.dtype.name == values.dtype.name
    assert (packed == values).all()


@pytest.mark.parametrize("first", [numpy.float16(1), numpy.float32(1), 1.0])
def test_numbers_that_a_column_can_hold(first: Any, tmp_path: Path) -> None:
    values = [first, 0.1, -7, float("inf"), float("nan"), numpy.int64(2), 1e-300]
    packed = pack_values(tmp_path / "out", *values)
    expected = numpy.array(values, getattr(first, "dtype", "float64"))
    numpy.testing.assert_array_equal(numpy.array(packed), expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (numpy.float32(1), 1e300),
        (numpy.float32(1), -1e39),
        (numpy.float16(1), numpy.float32(70_000)),
        (numpy.float16(1), 70_000),
        (numpy.float32(1), 2**24 + 1),
        (1.5, 2**60 + 1),
        (1.5, numpy.int64(2**60 + 1)),
        (1.5, 10**400),
        (1.5, numpy.complex128(1 + 2j)),
        (numpy.uint8(1), 300),
    ],
)
def test_number_that_a_column_would_change(first: Any, second: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample 1, column x"):
        pack_values(tmp_path / "out", first, second)


@pytest.mark.parametrize(
    "value", [torch.ones(3, dtype=torch.bfloat16), torch.eye(3).to_sparse(), torch.ones(3, device="meta")]
)
def test_tensor_without_an_array(value: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sample 0, column x") as caught:
        pack_values(tmp_path / "first", value)
    assert caught.value.fix and "float()" in caught.value.fix
    with pytest.raises(DataError, match="sample 1, column x"):
        pack_values(tmp_path / "second", torch.ones(3), value)


@pytest.mark.parametrize("name", ["latin.txt", "latin.jsonl"])
def test_text_in_another_encoding(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / name).write_bytes('"a"\n"\u00e4"\n'.encode("latin-1"))
    assert main(["pack", name, "out"]) == EXIT_INPUT
    message = capsys.readouterr().err
    assert f"{name}, line 2" in message and "[E_UNREADABLE]" in message


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("packed_source:nothing", "new"), "E_EMPTY_DATASET"),
        (("packed_source:mixed", "new"), "E_DATA"),
        (("packed_source:other_columns", "new"), "E_COLUMN"),
        (("packed_source:number", "new"), "E_DATA"),
        (("packed_source:missing", "new"), "E_UNKNOWN_NAME"),
        (("packed_source:plain", "new", "--column", "other=json"), "E_COLUMN"),
        (("packed_source:plain", "new", "--column", "number=pkl"), "E_VALUE"),
        (("packed_source:plain", "new", "--option", "count"), "E_VALUE"),
        (("packed_source:plain", "new", "--file-size", "large"), "E_SIZE"),
        (("packed_source:plain", "full"), "E_OUTPUT"),
        (("packed_source:plain",), "E_OPTION_CONFLICT"),
        (("missing.jsonl", "new"), "E_FILE_MISSING"),
        (("damaged.jsonl", "new"), "E_UNREADABLE"),
        (("full", "--index"), "E_OPTION_CONFLICT"),
        (("full", "--index", "--from", "mds"), "E_DATA"),
        (("full", "--index", "--from", "parquet"), "E_FILE_MISSING"),
    ],
)
def test_input_that_cannot_be_packed(
    arguments: tuple[str, ...], code: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "full").mkdir()
    (place / "full" / "file").touch()
    (place / "damaged.jsonl").write_text('{"a": 1}\n{"a": \n', encoding="utf-8")
    assert main(["pack", *arguments]) == EXIT_INPUT
    assert code_of(capsys) == code


def test_other_arguments_for_the_same_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND]) == EXIT_DONE
    assert main([*COMMAND[:-1], "800"]) == EXIT_INPUT
    assert code_of(capsys) == "E_OUTPUT"


def test_files_of_lines_from_windows(place: Path) -> None:
    for name, lines in (
        ("a.txt", ["one", "", "two"]),
        ("a.jsonl", ['{"text": "one"}', '{"text": ""}', '{"text": "two"}']),
    ):
        (place / name).write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode())
        read = samples_of(str(place / name), None, {})
        assert list(read(0)) == [{"text": "one"}, {"text": ""}, {"text": "two"}]
        assert list(read(1)) == [{"text": ""}, {"text": "two"}]


def test_files_of_lines(place: Path) -> None:
    rows = [{"text": f"ä {i}", "meta": {"list": [i, None]}, "flag": i % 2 == 0} for i in range(5)]
    (place / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    assert main(["pack", "rows.jsonl", "out"]) == EXIT_DONE
    assert read_all(place / "out") == rows
    (place / "lines.txt").write_text("first\n\nlast", encoding="utf-8")
    assert main(["pack", "lines.txt", "lines"]) == EXIT_DONE
    assert read_all(place / "lines") == [{"text": "first"}, {"text": ""}, {"text": "last"}]


def test_folder_of_another_format(place: Path) -> None:
    numpy.arange(41, dtype="<u2").tofile(place / "a.bin")
    arguments = ("--from", "tokens", "--option", "length=4", "--file-size", "300")
    assert main(["pack", str(place), "out", *arguments]) == EXIT_DONE
    samples = read_all(place / "out")
    assert [sample["value"].tolist() for sample in samples] == [list(range(4 * i, 4 * i + 5)) for i in range(10)]
    (place / "out" / "shard.00001.mds").unlink()  # continues in the middle of a file
    before = contents(place / "out")
    assert main(["pack", str(place), "out", *arguments]) == EXIT_DONE
    assert {name: contents(place / "out")[name] for name in before} == before
    assert len(read_all(place / "out")) == 10


def test_index_of_tar_files(place: Path) -> None:
    shutil.copytree(FILES / "webdataset", place / "tars")
    expected = read_all(place / "tars", "webdataset")
    assert main(["pack", "tars", "--index", "--from", "webdataset"]) == EXIT_DONE
    assert read_all(place / "tars", "webdataset") == expected
    first, *lines = (place / "tars" / "part-00.tar.idx").read_text(encoding="utf-8").splitlines()
    assert first == "v1.2 4" and lines[0].split(" ")[0] == "cls" and lines[0].split(" ")[3] == "sub/000.cls"
    path = place / "tars" / "part-01.tar"
    data = bytearray(path.read_bytes())
    data[520] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="E_FILE_CHANGED") as caught:
        read_all(place / "tars", "webdataset")
    assert "part-01.tar" in str(caught.value)


def test_index_of_a_missing_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "missing", "--index", "--from", "parquet"]) == EXIT_INPUT
    assert capsys.readouterr().err.count("error: ") == 1
    assert not (place / "missing").exists()
