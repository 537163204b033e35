"""One writer of files: what each rank sees, and what is in the real file system."""

import builtins
import bz2
import csv
import glob
import gzip
import io
import json
import logging
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
import zipfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader, Dataset

from helpers.file_ranks import KEEP_BYTES, Rank, on_ranks, tree
from samestep.distributed.status import local_rank_status
from samestep.errors import RunError
from samestep.script.file_journal import Journal
from samestep.script.first_writer import one_writer

LARGE = 3 * KEEP_BYTES

# --- libraries: a function writes a file with a value of its rank, and returns what it reads back ---


def _logging(value: int) -> Any:
    handler = logging.FileHandler("run.log", mode="w")
    logger = logging.Logger("script")
    logger.addHandler(handler)
    logger.info("value %d", value)
    handler.close()
    return Path("run.log").read_text() == f"value {value}\n"


def _csv(value: int) -> Any:
    with open("log.csv", "w", newline="") as file:
        csv.writer(file).writerow(["loss", value])
    with open("log.csv", "a", newline="") as file:
        csv.writer(file).writerow(["end", value])
    with open("log.csv", newline="") as file:
        return list(csv.reader(file)) == [["loss", str(value)], ["end", str(value)]]


def _json_and_pickle(value: int) -> Any:
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        json.dump({"value": value}, open("a.json", "w"))  # noqa: SIM115
    Path("a.pkl").write_bytes(pickle.dumps(value))
    with open("a.json") as text, open("a.pkl", "rb") as data:
        return json.load(text)["value"] == pickle.load(data) == value


def _numpy(value: int) -> Any:
    array = np.full((10, 3), value, dtype=np.float64)
    np.save("a.npy", array)
    np.savez("a.npz", first=array)
    np.savetxt("a.txt", array)
    array.tofile("a.bin")
    mapped = np.memmap("a.map", dtype=np.float64, mode="w+", shape=(5000,))  # above the limit
    mapped[:] = value
    mapped.flush()
    loaded = [np.load("a.npy"), np.load("a.npz")["first"], np.loadtxt("a.txt"), np.fromfile("a.bin").reshape(10, 3)]
    return all((one == value).all() for one in [*loaded, np.memmap("a.map", dtype=np.float64, mode="r")])


def _pandas(value: int) -> Any:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"value": [value, value]})
    frame.to_csv("a.csv", index=False)
    frame.to_parquet("a.parquet")
    return bool(
        (pandas.read_csv("a.csv") == frame).all().all() and (pandas.read_parquet("a.parquet") == frame).all().all()
    )


def _pil(value: int) -> Any:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4), (value, 0, 0)).save("a.png")
    with image.open("a.png") as read:
        return read.getpixel((0, 0)) == (value, 0, 0)


def _matplotlib(value: int) -> Any:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure()
    pyplot.plot([0, value])
    figure.savefig("a.png", metadata={"Title": str(value)})
    pyplot.close(figure)
    return f"Title\x00{value}".encode() in Path("a.png").read_bytes()


def _archives(value: int) -> Any:
    Path("in.txt").write_text(str(value))
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.write("in.txt")
    with tarfile.open("a.tar", "w") as tar:
        tar.add("in.txt")
    with zipfile.ZipFile("a.zip") as archive:
        archive.extractall("zip")
    with tarfile.open("a.tar") as tar:
        tar.extractall("tar", filter="data")
    with gzip.open("a.gz", "wt") as file:
        file.write(str(value))
    with bz2.open("a.bz2", "wt") as file:
        file.write(str(value))
    with gzip.open("a.gz", "rt") as first, bz2.open("a.bz2", "rt") as second:
        texts = [first.read(), second.read(), Path("zip/in.txt").read_text(), Path("tar/in.txt").read_text()]
    return texts == [str(value)] * 4


def _shutil(value: int) -> Any:
    os.makedirs("a/b")
    Path("a/b/c").write_text(str(value))
    shutil.copytree("a", "copy")
    shutil.move("copy", "moved")
    shutil.copy2("a/b/c", "moved/d")
    shutil.rmtree("a")
    state = (os.path.exists("a"), os.path.exists("copy"), sorted(os.listdir("moved")))
    return state == (False, False, ["b", "d"]) and Path("moved/b/c").read_text() == str(value)


def _pathlib(value: int) -> Any:
    Path("p/q").mkdir(parents=True)
    Path("p/q/r").touch()
    Path("p/q/r").write_text(str(value))
    Path("p/q/r").rename("p/s")
    Path("p/link").symlink_to("s")
    Path("p/q").rmdir()
    names = sorted(path.name for path in Path("p").iterdir())
    return names == ["link", "s"] and Path("p/link").read_text() == str(value) and Path("p/link").resolve().name == "s"


def _torch(value: int) -> Any:
    tensor = torch.full((10,), value)
    torch.save({"a": tensor}, "a.pt")
    torch.save({"a": tensor}, "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings(action="ignore"):  # deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "jit.pt")
        torch.jit.load("jit.pt")
    safetensors.torch.save_file({"a": tensor}, "a.safetensors")
    loaded = [torch.load("a.pt"), torch.load("a.pt", mmap=True), torch.load("old.pt")]
    loaded.append(safetensors.torch.load_file("a.safetensors"))
    return all((one["a"] == value).all() for one in loaded)


def _tokenizers(value: int) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": value}, unk_token="word"))
    words.save("tokenizer.json")
    return tokenizers.Tokenizer.from_file("tokenizer.json").encode("word").ids == [value]


def _tensorboard(value: int) -> Any:
    board = pytest.importorskip("torch.utils.tensorboard")
    with board.SummaryWriter("events") as writer:
        writer.add_scalar("loss", value, 1)
    (events,) = Path("events").iterdir()
    return b"loss" in events.read_bytes()


def _sqlite(value: int) -> Any:
    with sqlite3.connect("a.db") as base:
        base.execute("create table t (x integer)")
        base.execute("insert into t values (?)", (value,))
    base.close()
    base = sqlite3.connect("file:a.db?mode=ro", uri=True)
    rows = base.execute("select x from t").fetchall()
    base.close()
    return rows == [(value,)]


LIBRARIES = (_logging, _csv, _json_and_pickle, _numpy, _pil, _archives, _shutil, _pathlib, _torch, _sqlite, _tokenizers)
LARGER = (_pandas, _matplotlib, _tensorboard)


@pytest.mark.parametrize("functions", [LIBRARIES, pytest.param(LARGER, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_each_rank_reads_what_it_has_written_and_rank_0_alone_writes(functions: Any, tmp_path: Path) -> None:
    def written(function: Any, value: int) -> Any:
        os.mkdir(function.__name__)
        with chdir(function.__name__):
            return function(value)

    def body(rank: Rank) -> list[str]:
        wrong = []
        for function in functions:
            rank.exchange()
            rank.first_later(0.05)
            if not written(function, rank.rank + 1):
                wrong.append(function.__name__)
        return wrong

    assert on_ranks(body, tmp_path / "ranks") == [[]] * 3
    os.makedirs(tmp_path / "plain")
    with chdir(tmp_path / "plain"):
        assert all(written(function, 1) for function in functions)
    for function in functions:
        real, plain = (tree(tmp_path / name / function.__name__) for name in ("ranks", "plain"))
        assert len(real) == len(plain)
        if function is not _tensorboard:
            assert list(real) == list(plain)
        if function not in (_archives, _torch, _tensorboard):  # with times, or identifiers
            assert real == plain, function.__name__


# --- order of ranks ---


def test_later_changes_of_rank_0_are_not_seen_before_the_same_change(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "old").mkdir(parents=True)
    for name in ("written", "removed", "appended", "renamed"):
        (work / name).write_text(f"old {name}")
    (work / "link").symlink_to("removed")

    def body(rank: Rank) -> Any:
        rank.exchange()
        if not rank.is_first:
            rank.meet()  # rank 0 has made all changes
        before = [Path(name).read_text() for name in ("written", "removed", "appended", "renamed", "link")]
        before += [sorted(os.listdir(".")), sorted(glob.glob("*e*")), os.path.exists("new"), os.path.isdir("old")]
        Path("new").write_text("new")
        Path("written").write_text("now")
        os.remove("link")
        os.symlink("written", "link")
        os.remove("removed")
        with open("appended", "a") as file:
            file.write("!")
        os.rename("renamed", "renamed again")
        os.rmdir("old")
        if rank.is_first:
            rank.meet()
        after = [Path(name).read_text() for name in ("new", "written", "appended", "renamed again", "link")]
        return before, after, sorted(os.listdir("."))

    first, *others = on_ranks(body, work)
    names = ["appended", "link", "old", "removed", "renamed", "written"]
    texts = ["old written", "old removed", "old appended", "old renamed", "old removed"]
    assert first == (
        [*texts, names, ["appended", "removed", "renamed", "written"], False, True],
        ["new", "now", "old appended!", "old renamed", "now"],
        ["appended", "link", "new", "renamed again", "written"],
    )
    assert others == [first] * 2


def test_a_file_open_for_reading_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("old")

    def body(rank: Rank) -> Any:
        rank.exchange()
        with open("state.json") as file:
            rank.meet()
            rank.first_earlier()
            if rank.is_first:
                Path("state.json").write_text("new")
            return file.read()

    assert on_ranks(body, tmp_path) == ["old"] * 3
    assert (tmp_path / "state.json").read_text() == "new"


def test_the_header_of_a_log_is_written_once(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        rank.first_earlier()
        for epoch in range(3):
            if not os.path.exists("log.csv"):
                Path("log.csv").write_text("epoch\n")
            with open("log.csv", "a") as file:
                file.write(f"{epoch}\n")
        return Path("log.csv").read_text()

    assert on_ranks(body, tmp_path) == ["epoch\n0\n1\n2\n"] * 3


def test_run_folders_with_numbers_and_times(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        rank.first_earlier()
        os.makedirs("runs", exist_ok=True)
        numbered = f"runs/{len(os.listdir('runs'))}"
        os.makedirs(numbered)
        timed = f"runs/at-{time.time_ns()}"
        os.makedirs(timed)
        torch.save(rank.rank, f"{timed}/best.pt")
        return numbered, torch.load(f"{timed}/best.pt"), len(os.listdir("runs"))

    assert on_ranks(body, tmp_path) == [("runs/0", rank, 2) for rank in range(3)]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_listings_have_the_order_of_rank_0(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        if not rank.is_first:
            rank.meet()
        os.mkdir("new")
        for number in (7, 3, 9, 1, 8, 2):
            Path(f"new/{number}").touch()
        os.remove("new/9")
        if rank.is_first:
            rank.meet()
        return os.listdir("new"), [entry.name for entry in os.scandir("new")]

    first, *others = on_ranks(body, tmp_path)
    assert sorted(first[0]) == ["1", "2", "3", "7", "8"]
    assert others == [first] * 2


# --- preparation ---


def test_a_download_is_made_once_and_seen_complete(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.first_earlier(0.1)
        downloads = 0
        os.makedirs("data", exist_ok=True)
        if not os.path.exists("data/done.txt"):
            downloads += 1
            with open("data/done.txt", "w") as file:
                for part in "abc":
                    file.write(part)
                    file.flush()
                    time.sleep(0.1)
            Path("data/index").write_text("all")
        result = (downloads, Path("data/done.txt").read_text(), os.listdir("data") and Path("data/index").read_text())
        rank.exchange()
        return result

    assert on_ranks(body, tmp_path) == [(1, "abc", "all"), (0, "abc", "all"), (0, "abc", "all")]


@pytest.mark.parametrize(
    "query",
    [
        lambda: os.path.exists("empty/a.pt"),
        lambda: Path("empty/a.pt").read_bytes(),
        lambda: glob.glob("empty/*"),
        lambda: os.listdir("empty"),
        lambda: torch.load("empty/a.pt", mmap=True) == 1,
    ],
)
def test_what_does_not_exist_is_asked_again_when_rank_0_is_ready(query: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    def body(rank: Rank) -> Any:
        if rank.is_first:
            time.sleep(0.2)
            torch.save(1, "empty/a.pt")
            rank.writer.mark_ready()
            return True
        return bool(query())

    assert on_ranks(body, tmp_path) == [True] * 3


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        lambda path: os.listdir(f"{path}/."),
        lambda path: glob.glob(f"{path}/run*"),
        lambda path: list(Path(path).iterdir()),
    ],
)
def test_a_listing_shows_what_it_shows_on_rank_0(query: Any, is_late: bool, tmp_path: Path) -> None:
    (tmp_path / "old/run0").mkdir(parents=True)

    def body(rank: Rank) -> Any:
        if is_late:
            rank.first_earlier()
        else:
            rank.first_later()
        names = []
        for folder in ("old", "new"):
            for _ in range(2):
                os.makedirs(folder, exist_ok=True)
                names.append(f"{folder}/run{len(query(folder))}")
                os.mkdir(names[-1])
                Path(f"{names[-1]}/model").write_text(names[-1])
        rank.exchange()
        names.append(f"new/run{len(query('new'))}")
        return names, Path("new/run0/model").read_text(), sorted(os.listdir("old"))

    names = ["old/run1", "old/run2", "new/run0", "new/run1", "new/run2"]
    assert on_ranks(body, tmp_path) == [(names, "new/run0", ["run0", "run1", "run2"])] * 3


def test_work_that_needs_nothing_of_rank_0_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("data")

    def body(rank: Rank) -> Any:
        if rank.is_first:
            Path("first.log").write_text("start")
        rank.meet()
        if not rank.is_first:
            os.makedirs("runs/own", exist_ok=True)
            Path("runs/own/log").write_text("start")
            assert Path("data.txt").read_text() == "data"
            import colorsys  # noqa: F401
            import this  # noqa: F401

            assert not os.path.exists("/usr/share/nothing")
        rank.meet()  # rank 0 is not ready before
        rank.exchange()
        return sorted(os.listdir("."))

    assert on_ranks(body, tmp_path) == [["data.txt", "first.log"], *[["data.txt", "first.log", "runs"]] * 2]


def test_folders_and_removals_of_rank_0_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")

    def body(rank: Rank) -> Any:
        if rank.is_first:
            os.mkdir("exp")
            Path("exp/log").write_text("first")
            os.remove("old")
            rank.writer.mark_ready()
        rank.meet()
        if not rank.is_first:
            os.mkdir("exp")
            os.remove("old")
        with pytest.raises(FileExistsError):
            os.mkdir("exp")
        with pytest.raises(FileNotFoundError):
            os.remove("old")
        return os.listdir("exp")

    assert on_ranks(body, tmp_path) == [["log"]] * 3


def test_a_wait_for_preparation_is_seen_and_counts_as_progress(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        if rank.is_first:
            rank.meet()
            time.sleep(0.6)
            rank.writer.mark_ready()
            return []
        rank.meet()
        seen = []

        def watch() -> None:
            for _ in range(4):
                time.sleep(0.08)
                seen.append(rank.status.snapshot)

        thread = threading.Thread(target=watch)
        thread.start()
        assert not os.path.exists("data")
        thread.join()
        changes = {snapshot.last_change for snapshot in seen}
        return [len(changes), seen[1].is_waiting, seen[1].activity, rank.status.snapshot.is_waiting]

    first, *others = on_ranks(body, tmp_path)
    assert first == []
    assert others == [[4, True, ", waiting in the preparation by rank 0", False]] * 2


# --- large files ---


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("best.pt", marks=pytest.mark.long), "runs/{}/best.pt"])
def test_a_large_file_is_read_back_from_rank_0(where: str, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        path = Path(where.format(time.time_ns()))
        path.parent.mkdir(parents=True, exist_ok=True)
        results = []
        for epoch in range(3):
            (rank.first_later if epoch % 2 else rank.first_earlier)(0.1)
            torch.save(torch.full((LARGE,), epoch, dtype=torch.uint8), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
            results.append((path.stat().st_size > LARGE, torch.load(path).unique().tolist()))
        kept = sum(file.stat().st_blocks for file in Path(rank.writer._root).rglob("*")) if rank.rank else 0
        return results, kept < 64

    expected = [(True, [epoch]) for epoch in range(3)]
    assert on_ranks(body, tmp_path, keep_bytes=KEEP_BYTES) == [(expected, True)] * 3


@pytest.mark.slow
def test_rank_0_keeps_a_large_file_until_all_have_read_it(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        results = []
        for epoch in range(3):
            Path("a.bin").write_bytes(bytes([epoch]) * LARGE)
            if not rank.is_first:
                time.sleep(0.1)
            with open("a.bin", "rb") as file:
                if not rank.is_first:
                    time.sleep(0.1)
                results.append(set(file.read()))
        return results

    assert on_ranks(body, tmp_path) == [[{0}, {1}, {2}]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_no_order_of_ranks_shows_another_version_of_a_large_file(seed: int, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        draws = random.Random(3 * seed + rank.rank)
        append = Journal.append

        def slow_append(journal: Journal, *entry: Any) -> None:
            time.sleep(draws.choice([0, 0, 0.05]))
            append(journal, *entry)
            time.sleep(draws.choice([0, 0, 0.05]))

        Journal.append = slow_append  # type: ignore[method-assign]
        rank.exchange()
        results = []
        for epoch in range(4):
            Path("a.tmp").write_bytes(bytes([epoch]) * LARGE)
            os.replace("a.tmp", "a.bin")
            with open("a.bin", "rb") as file:
                results.append(set(file.read()))
            if epoch == 2:
                with open("a.bin", "r+b") as file:  # in place
                    file.write(bytes([9]))
        os.remove("a.bin")
        return results

    assert on_ranks(body, tmp_path) == [[{0}, {1}, {2}, {3}]] * 3


def test_a_renamed_folder_keeps_its_large_files_and_links(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        results = []
        for epoch in range(2):
            rank.exchange()
            (rank.first_later if epoch else rank.first_earlier)(0.1)
            os.makedirs("part/deep")
            Path("part/deep/model").write_bytes(bytes([epoch]) * LARGE)
            os.symlink("deep/model", "part/newest")
            shutil.rmtree("complete", ignore_errors=True)
            os.rename("part", "complete")
            results.append((set(Path("complete/newest").read_bytes()), os.path.exists("part")))
        return results

    assert on_ranks(body, tmp_path) == [[({0}, False), ({1}, False)]] * 3
    assert list(tree(tmp_path)) == ["complete", "complete/deep", "complete/deep/model", "complete/newest"]


def test_a_forked_process_waits_for_a_large_file_of_a_later_exchange(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        asks, sends = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(asks, 1)
            Path("sizes").write_text(str(set(Path("a.bin").read_bytes())))
            os._exit(0)
        rank.exchange()
        rank.first_later(0.3)
        Path("a.bin").write_bytes(b"1" * LARGE)
        os.write(sends, b"1")
        os.waitpid(child, 0)
        return Path("sizes").read_text()

    assert on_ranks(body, tmp_path) == ["{49}"] * 3


def test_large_files_of_passed_exchanges_are_closed(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        counts = []
        for epoch in range(3):
            Path("a.bin").write_bytes(bytes([epoch]) * LARGE)
            rank.exchange()
            counts.append(len(os.listdir(f"/proc/{os.getpid()}/fd")))
        return counts[2] - counts[1]

    assert on_ranks(body, tmp_path) == [0] * 3


def test_large_files_in_another_order_are_not_exchanged(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        names = ["part-1.bin", "part-2.bin"]  # threads may write them in any order
        for name in names if rank.is_first else reversed(names):
            rank.first_later(0.1)
            Path(name).write_bytes(name.encode() * LARGE)
        rank.exchange()
        return [Path(name).read_bytes()[: len(name)].decode() for name in names]

    first, *others = on_ranks(body, tmp_path)
    assert first == ["part-1.bin", "part-2.bin"]
    for result in others:
        assert "[E_SCRIPT_FILES]" in result


@pytest.mark.parametrize("name", ["temporary", "random"])
def test_a_large_file_below_a_random_name(name: str, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        folder = tempfile.mkdtemp(dir=".") if name == "temporary" else "".join("abc"[rank.rank] for _ in range(9))
        os.makedirs(folder, exist_ok=True)
        path = Path(folder, "best.pt")
        path.write_bytes(b"1" * LARGE)
        content = path.read_bytes()
        shutil.rmtree(folder)
        return len(content)

    first, *others = on_ranks(body, tmp_path)
    assert first == LARGE
    for result in others:
        assert result == LARGE if name == "temporary" else "[E_SCRIPT_FILES]" in result


@pytest.mark.parametrize("waits", [False, True], ids=["ends", "waits"])
def test_large_content_that_rank_0_never_writes_is_an_error_with_the_line(waits: bool, tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        if rank.is_first:
            if waits:
                rank.writer.exchange()
                time.sleep(1)
            return waits
        Path("own.bin").write_bytes(bytes(LARGE))
        start = time.monotonic()
        with pytest.raises(RunError) as raised:
            Path("own.bin").read_bytes()
        assert time.monotonic() - start < 0.9
        return str(raised.value)

    first, *others = on_ranks(body, tmp_path)
    assert first == waits
    for text in others:
        assert "test_first_writer.py:" in text
        assert "own.bin is read, but its content is gone or was never written by rank 0 [E_SCRIPT_FILES]" in text


# --- processes, threads, folders ---


class _Files(Dataset[str]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> str:
        Path(f"worker-{index}").write_text("own")
        return Path("vocabulary").read_text() + Path(f"worker-{index}").read_text()


@pytest.mark.slow
def test_loader_workers_have_the_view_of_their_rank(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        Path("vocabulary").write_text(f"words of {rank.rank} ")
        loader = DataLoader(_Files(), num_workers=2, batch_size=4, multiprocessing_context="fork")
        texts = {text for batch in loader for text in batch}
        rank.exchange()
        return texts, Path("worker-7").read_text()

    assert on_ranks(body, tmp_path) == [({f"words of {rank} own"}, "own") for rank in range(3)]
    assert len(tree(tmp_path)) == 9


@pytest.mark.slow
def test_threads_write_and_read(tmp_path: Path) -> None:
    for step in range(0, 30, 2):
        (tmp_path / f"common{step}").write_text("old\n" * 100)

    def body(rank: Rank) -> Any:
        sys.setswitchinterval(1e-6)
        rank.exchange()
        errors = []
        start = threading.Barrier(4)

        def work(name: int) -> None:
            try:
                for step in range(30):
                    start.wait(30)
                    with open(f"common{step}", "a") as file:
                        file.write(f"{name}\n")
                    Path(f"{name}.txt").write_text(f"{step} {rank.rank}")
                    assert Path(f"{name}.txt").read_text() == f"{step} {rank.rank}"
            except BaseException as error:
                start.abort()
                errors.append(repr(error))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors, [len(Path(f"common{step}").read_text().splitlines()) for step in range(30)]

    assert on_ranks(body, tmp_path) == [([], [104, 4] * 15)] * 3


def test_working_directory_in_an_own_folder(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("data")

    def body(rank: Rank) -> Any:
        rank.exchange()
        rank.first_earlier(0.1 * rank.rank)
        Path("run").mkdir()
        os.chdir("run")
        Path("log").write_text(str(rank.rank))
        assert shutil.disk_usage(".").free > 0
        np.ones(3).tofile("a.bin")
        result = os.getcwd(), Path("../data.txt").read_text(), Path("log").read_text(), sorted(os.listdir("."))
        os.chdir("..")
        return *result, os.getcwd(), os.path.abspath("x")

    texts = [(str(tmp_path / "run"), "data", str(rank), ["a.bin", "log"]) for rank in range(3)]
    assert on_ranks(body, tmp_path) == [(*text, str(tmp_path), str(tmp_path / "x")) for text in texts]


def test_temporary_files_and_bytecode_are_real_on_every_rank(tmp_path: Path) -> None:
    def body(rank: Rank) -> Any:
        rank.exchange()
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w") as file:
            Path(folder, "a").write_text("text")
            file.write("text")
            file.flush()
            texts = [
                subprocess.run(["cat", name], capture_output=True, check=True).stdout
                for name in (f"{folder}/a", file.name)
            ]
        os.makedirs("__pycache__", exist_ok=True)
        Path(f"__pycache__/{rank.rank}.pyc").write_bytes(b"code")
        Path("/dev/null").write_text("nothing")
        with tempfile.NamedTemporaryFile("w", dir="."):
            pass
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write(str(rank.rank))
        os.replace(file.name, "atomic")
        return (
            texts,
            os.path.exists(folder),
            Path("atomic").read_text(),
            [name for name in os.listdir(".") if "tmp" in name],
        )

    assert on_ranks(body, tmp_path) == [([b"text"] * 2, False, str(rank), []) for rank in range(3)]
    assert sorted(tree(tmp_path)) == ["__pycache__", *(f"__pycache__/{rank}.pyc" for rank in range(3)), "atomic"]


def test_all_functions_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def functions() -> list[Any]:
        return [
            *(getattr(os, name) for name in dir(os)),
            *(builtins.open, io.open, tarfile.bltn_open, tempfile.mkdtemp, glob.glob, torch.save, torch.load),  # type: ignore[attr-defined]
            *(safetensors.torch.serialize_file, sqlite3.connect),
            *(os.supports_fd, os.supports_follow_symlinks, shutil._use_fd_functions),  # type: ignore[attr-defined]
        ]

    before = functions()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    for rank in (0, 1):
        with one_writer(rank, 2, tmp_path / "shared", local_rank_status()) as writer:
            writer.exchange()
            held = open
            assert functions() != before
        assert functions() == before
        held("real", "w").close()
        assert (tmp_path / "real").exists()
        (tmp_path / "real").unlink()
    assert not (tmp_path / "shared/rank-1").exists()
