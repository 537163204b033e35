"""The end of a script as in plain Python."""

import atexit
import gzip
import io
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samestep
from samestep.script.process_end import (
    children_ended,
    exit_functions_called,
    files_closed,
    plain_start_method,
    threads_joined,
)


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


@pytest.fixture
def plain_children() -> Iterator[None]:
    method = multiprocessing.get_start_method(allow_none=True)
    with plain_start_method(), children_ended():
        yield
    assert multiprocessing.get_start_method(allow_none=True) == method


def train() -> float:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    return 1.0


def prepare(number: int) -> float:
    model = nn.Linear(1, 1).requires_grad_(False)
    return model(torch.full((1, 1), float(number))).item() * 0 + number**2


class Squares(Dataset[float]):
    def __init__(self) -> None:
        self.read = lambda number: float(number**2)  # spawned workers could not receive it

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.read(index)


def test_children_that_prepare_data_are_as_in_plain_python(plain_children: None) -> None:
    assert multiprocessing.get_start_method() == "fork"
    with multiprocessing.Pool(2) as pool:
        assert pool.map(prepare, [2, 3]) == [4.0, 9.0]
    with ProcessPoolExecutor(2) as executor:
        assert list(executor.map(prepare, [2, 3])) == [4.0, 9.0]
    assert torch.cat(list(DataLoader(Squares(), 2, num_workers=2))).tolist() == [0, 1, 4, 9]
    assert train() == 1.0  # this process may


@pytest.mark.parametrize(
    ("end", "code"), [(None, 0), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("text"), 1), (ValueError(), 1)]
)
def test_forked_child_ends_with_the_script(end: BaseException | None, code: int) -> None:
    codes = []
    with plain_start_method(), children_ended():
        child = os.fork()
        if child == 0 and end is not None:
            raise end
        if child != 0:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    assert codes == [code]


def test_start_method_can_be_set_once_by_the_script(plain_children: None) -> None:
    multiprocessing.set_start_method("spawn")
    with pytest.raises(RuntimeError, match="already been set"):
        multiprocessing.set_start_method("fork")
    assert multiprocessing.get_start_method() == "spawn"


def _methods() -> list[str | None]:
    random.seed(0)
    before = multiprocessing.get_start_method(allow_none=True)
    with plain_start_method(), children_ended():
        inside = multiprocessing.get_start_method()
        with multiprocessing.Pool(1) as pool:
            pool.map(prepare, [1])
    return [before, inside, multiprocessing.get_start_method(allow_none=True)]


@pytest.mark.slow
def test_ranks_start_processes_as_plain_python() -> None:
    assert samestep.launch(_methods, processes=1) == ["forkserver", "fork", "forkserver"]
