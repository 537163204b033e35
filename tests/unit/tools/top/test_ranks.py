"""Which ranks are heard of, silent, or gone."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from samestep.tools.top.picture import RankRow
from samestep.tools.top.ranks import SILENT_SECONDS, RankFiles

HERE = socket.gethostname()
OLD = 1  # a process that was there before any test


def write(
    folder: Path, rank: int, *, age: float = 0.0, pid: int | None = None, host: str = HERE, step: int = 1
) -> None:
    facts = {"time": time.time() - age, "rank": rank, "host": host, "pid": pid or os.getpid(), "step": step}
    with (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def rows(folder: Path, processes: int | None = None, since: float = 0.0, *, is_expected: bool = True) -> list[RankRow]:
    files = RankFiles(folder)
    files.look()
    return files.rows(processes, since, is_expected=is_expected)


def signs(found: list[RankRow]) -> dict[int, str]:
    return {row.rank: row.sign for row in found}


@contextmanager
def another_process() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_no_folder_has_no_ranks_but_those_that_are_to_come(tmp_path: Path) -> None:
    assert rows(tmp_path / "ranks") == []
    assert signs(rows(tmp_path / "ranks", 2)) == {0: "not heard", 1: "not heard"}


def test_a_rank_that_has_not_written_for_ten_seconds_is_silent(tmp_path: Path) -> None:
    write(tmp_path, 0, age=SILENT_SECONDS - 1, pid=OLD)
    write(tmp_path, 1, age=SILENT_SECONDS + 1, pid=OLD)
    found = rows(tmp_path)
    assert signs(found) == {0: "heard", 1: "silent"}
    assert found[1].age_seconds == pytest.approx(SILENT_SECONDS + 1, abs=0.5)
    assert signs(rows(tmp_path, is_expected=False)) == {0: "heard", 1: "heard"}


def test_a_rank_whose_process_has_ended_is_gone_at_once(tmp_path: Path) -> None:
    with another_process() as number:
        write(tmp_path, 0, pid=number)
        write(tmp_path, 1)
        assert signs(rows(tmp_path)) == {0: "heard", 1: "heard"}
    assert signs(rows(tmp_path)) == {0: "gone", 1: "heard"}


def test_a_later_process_of_the_same_number_is_another_one(tmp_path: Path) -> None:
    write(tmp_path, 0, age=60, pid=OLD)
    with another_process() as number:
        write(tmp_path, 1, age=60, pid=number)
        assert signs(rows(tmp_path)) == {0: "silent", 1: "gone"}


def test_of_another_machine_only_silence_is_known(tmp_path: Path) -> None:
    with another_process() as number:
        write(tmp_path, 0, pid=number, host="another")
    assert signs(rows(tmp_path)) == {0: "heard"}


def test_a_clock_that_is_behind_does_not_make_a_rank_silent(tmp_path: Path) -> None:
    write(tmp_path, 0, age=1000, host="another")
    files = RankFiles(tmp_path)
    files.look()
    assert signs(files.rows(None, 0.0, is_expected=True)) == {0: "silent"}, "all that is known yet"
    write(tmp_path, 0, age=998, host="another")
    files.look()
    assert signs(files.rows(None, 0.0, is_expected=True)) == {0: "heard"}


def test_the_last_whole_line_counts(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, 0, step=step)
    with (tmp_path / "rank-0.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"time": 17')
    files = RankFiles(tmp_path)
    files.look()
    assert files.rows(None, 0.0, is_expected=True)[0].line["step"] == 2
    with (tmp_path / "rank-0.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    write(tmp_path, 0, step=3)
    files.look()
    assert files.rows(None, 0.0, is_expected=True)[0].line["step"] == 3
    assert files.unreadable == 1


def test_ranks_of_an_earlier_part_of_the_run_are_left_out(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, rank, age=60)
    for rank in range(3):
        write(tmp_path, rank)
    assert list(signs(rows(tmp_path, 3, time.time() - 30))) == [0, 1, 2]
    write(tmp_path, 3)  # it begins again, and what it is part of is not written down yet
    assert list(signs(rows(tmp_path, 3, time.time() - 30))) == [0, 1, 2, 3]
