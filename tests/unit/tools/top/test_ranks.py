"""Reading of appended lines, and ranks that are active, silent, gone or missing."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.tools.top.run_status import SILENT_SECONDS, LineFollower, RankFile, RankRow, rank_rows, update_rank_files

LOCAL_HOST = socket.gethostname()
OLD = 1  # number of a process older than any test


def write(
    folder: Path, rank: int, *, age: float = 0.0, pid: int | None = None, host: str = LOCAL_HOST, step: int = 1
) -> None:
    line = {"time": time.time() - age, "rank": rank, "host": host, "pid": pid or os.getpid(), "step": step}
    with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def rows(
    folder: Path,
    processes: int | None = None,
    since: float = 0.0,
    *,
    files: dict[int, RankFile] | None = None,
    is_running: bool = True,
) -> list[RankRow]:
    files = {} if files is None else files
    update_rank_files(folder, files)
    return rank_rows(files, processes, since, is_running=is_running)


def signs(rows: list[RankRow]) -> dict[int, str]:
    return {row.rank: row.sign for row in rows}


@contextmanager
def another_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_expected_ranks_without_files_are_missing(tmp_path: Path) -> None:
    assert rows(tmp_path / "ranks") == []
    assert signs(rows(tmp_path / "ranks", 2)) == {0: "missing", 1: "missing"}


def test_rank_without_a_line_for_ten_seconds_is_silent(tmp_path: Path) -> None:
    write(tmp_path, 0, age=SILENT_SECONDS / 2, pid=OLD)
    write(tmp_path, 1, age=SILENT_SECONDS + 1, pid=OLD)
    states = rows(tmp_path)
    assert signs(states) == {0: "active", 1: "silent"}
    assert states[1].age_seconds == pytest.approx(SILENT_SECONDS + 1, abs=3)
    assert signs(rows(tmp_path, is_running=False)) == {0: "active", 1: "active"}


def test_rank_with_an_ended_process_is_gone_at_once(tmp_path: Path) -> None:
    with another_process() as number:
        write(tmp_path, 0, pid=number)
        write(tmp_path, 1)
        assert signs(rows(tmp_path)) == {0: "active", 1: "active"}
    assert signs(rows(tmp_path)) == {0: "gone", 1: "active"}


def test_later_process_with_the_same_number_is_another_process(tmp_path: Path) -> None:
    write(tmp_path, 0, age=60, pid=OLD)
    with another_process() as number:
        write(tmp_path, 1, age=60, pid=number)
        assert signs(rows(tmp_path)) == {0: "silent", 1: "gone"}


def test_process_on_another_machine_is_never_gone(tmp_path: Path) -> None:
    with another_process() as number:
        write(tmp_path, 0, pid=number, host="another")
    assert signs(rows(tmp_path)) == {0: "active"}


def test_wrong_clock_of_another_machine_does_not_make_a_rank_silent(tmp_path: Path) -> None:
    write(tmp_path, 0, age=1000, host="another")
    files: dict[int, RankFile] = {}
    assert signs(rows(tmp_path, files=files)) == {0: "silent"}, "the first line has no other time"
    write(tmp_path, 0, age=998, host="another")
    assert signs(rows(tmp_path, files=files)) == {0: "active"}


def test_last_complete_line_is_used(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, 0, step=step)
    with (tmp_path / "rank-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 17')
    files: dict[int, RankFile] = {}
    assert rows(tmp_path, files=files)[0].line["step"] == 2
    with (tmp_path / "rank-0.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    write(tmp_path, 0, step=3)
    assert rows(tmp_path, files=files)[0].line["step"] == 3
    assert files[0].unreadable == 1


def test_ranks_of_an_earlier_start_are_omitted(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, age=60)
    for rank in range(3):
        write(tmp_path, rank)
    assert list(signs(rows(tmp_path, 3, time.time() - 30))) == [0, 1, 2]
    write(tmp_path, 3)  # started again, before the new entry in environment.json
    assert list(signs(rows(tmp_path, 3, time.time() - 30))) == [0, 1, 2, 3]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_missing_file_has_no_lines(tmp_path: Path) -> None:
    follower = LineFollower(tmp_path / "a")
    assert list(follower.new_lines()) == []
    append(tmp_path / "a", b"one\n")
    assert list(follower.new_lines()) == [b"one"]
    assert list(follower.new_lines()) == []


def test_incomplete_line_is_returned_after_its_completion(tmp_path: Path) -> None:
    follower = LineFollower(tmp_path / "a")
    text = "é\n".encode()
    append(tmp_path / "a", b"one\ntw" + text[:1])
    assert list(follower.new_lines()) == [b"one"]
    append(tmp_path / "a", text[1:])
    assert list(follower.new_lines()) == ["twé".encode()]


@given(st.lists(st.binary(max_size=12)), st.integers(1, 5))
def test_lines_do_not_depend_on_the_sizes_of_writes(writes: list[bytes], every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, lines = Path(folder) / "a", list[bytes]()
        follower = LineFollower(path)
        for number, data in enumerate(writes):
            append(path, data)
            if number % every == 0:
                lines += follower.new_lines()
        lines += follower.new_lines()
        assert lines == b"".join(writes).split(b"\n")[:-1]


def test_read_bytes_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    follower = LineFollower(path)
    append(path, b"one\n")
    assert list(follower.new_lines()) == [b"one"]
    with path.open("r+b") as file:  # a change that a second read would return
        file.write(b"two")
    append(path, b"three\n")
    assert list(follower.new_lines()) == [b"three"]


def test_replaced_and_truncated_files_are_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a"
    follower = LineFollower(path)
    append(path, b"one\nhalf")
    assert list(follower.new_lines()) == [b"one"]
    append(tmp_path / "b", b"a longer line of another file\n")
    (tmp_path / "b").replace(path)
    assert list(follower.new_lines()) == [b"a longer line of another file"]
    os.truncate(path, 0)
    append(path, b"short\n")
    assert list(follower.new_lines()) == [b"short"]


def test_last_bytes_limits_the_first_read(tmp_path: Path) -> None:
    append(tmp_path / "a", b"".join(b"line %04d\n" % number for number in range(1000)))
    follower = LineFollower(tmp_path / "a", last_bytes=25)
    assert list(follower.new_lines()) == [b"line 0998", b"line 0999"]
    append(tmp_path / "a", b"line 1000\n")
    assert list(follower.new_lines()) == [b"line 1000"]
