"""The end of a script as in plain Python."""

import atexit
import gzip
import io
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samestep.script.process_end import exit_functions_called, files_closed, threads_joined


def registered(end: Callable[[], Any] = lambda: None) -> list[Any]:
    """Return the calls of functions that were registered before `end`, during the block, which must end then."""
    calls: list[Any] = []
    removed = calls.clear
    try:
        with exit_functions_called():
            atexit.register(calls.append, "first")

            @atexit.register
            def nested() -> None:
                calls.append("second")
                atexit.register(calls.append, "third")

            atexit.register(removed)
            atexit.unregister(removed)
            assert calls == []
            end()
    except (SystemExit, OSError) as error:
        calls.append(type(error))
    return calls


def fail(error: BaseException) -> Callable[[], Any]:
    def end() -> None:
        raise error

    return end


@pytest.mark.parametrize("error", [SystemExit(2), OSError()])
def test_the_last_one_is_called_first(error: BaseException) -> None:
    assert registered() == ["second", "third", "first"]
    assert registered(fail(error)) == ["second", "third", "first", type(error)]


def test_an_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert registered(lambda: atexit.register(fail(OSError("no space")))) == ["second", "third", "first"]
    assert capsys.readouterr().err.endswith("OSError: no space\n")


def test_temporary_folders_are_removed_but_not_those_of_before() -> None:
    with tempfile.TemporaryDirectory() as before:
        with exit_functions_called():
            inside = tempfile.TemporaryDirectory()
            assert os.path.isdir(inside.name)
        assert not os.path.exists(inside.name)
        assert os.path.isdir(before)


def test_functions_of_atexit_are_restored() -> None:
    before = dict(vars(atexit))
    registered()
    assert dict(vars(atexit)) == before


def test_files_that_were_not_closed_are_complete(tmp_path: Path) -> None:
    open_before = (tmp_path / "before").open("w", encoding="utf-8")
    with files_closed():
        text = (tmp_path / "text").open("w", encoding="utf-8")
        text.write("first\n")
        packed = gzip.open(tmp_path / "packed", "wt", encoding="utf-8")  # noqa: SIM115
        packed.write("second\n")
        raw = (tmp_path / "raw").open("wb", buffering=0)
        closed = (tmp_path / "closed").open("w", encoding="utf-8")
        closed.close()
        memory = io.StringIO()
    assert (text.closed, packed.closed, raw.closed, memory.closed, open_before.closed) == (
        True,
        True,
        True,
        False,
        False,
    )
    open_before.close()
    assert (tmp_path / "text").read_text() == "first\n"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"second\n"


@pytest.mark.parametrize("error", [None, SystemExit(3), OSError("no space")])
def test_threads_end_before_the_block_unless_there_is_an_error(error: BaseException | None) -> None:
    ended: list[str] = []
    can_end = threading.Event()

    def run(name: str) -> None:
        can_end.wait()
        ended.append(name)

    before = ThreadPoolExecutor(1)
    try:
        with threads_joined():
            threading.Thread(target=run, args=("thread",)).start()
            inside = ThreadPoolExecutor(1)
            for name in ("task", "next task"):
                inside.submit(run, name)
            threading.Timer(0.1, can_end.set).start()
            if error is not None:
                raise error
    except (SystemExit, OSError) as raised:
        assert raised is error
    if isinstance(error, OSError):
        assert ended == []
        inside.shutdown()
    assert sorted(ended)[:2] == ["next task", "task"]
    assert before.submit(time.time).result() > 0
    before.shutdown()


def test_a_long_wait_for_threads_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    is_reported = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        is_reported.set()

    monkeypatch.setattr("samestep.script.process_end._REPORT_SECONDS", 0.02)
    monkeypatch.setattr("samestep.script.process_end.report_line", report)

    def upload() -> None:
        is_reported.wait()
        time.sleep(0.1)  # further waits

    with threads_joined():
        threading.Thread(target=upload, name="upload").start()
    assert lines == ["samestep: the script has ended and waits for its threads: upload"]
