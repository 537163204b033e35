"""Functions that are called in a copy of the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.data.process_copy import called_in_copy


def test_copy_leaves_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = [1]
    (tmp_path / "text").write_text("one\ntwo\nthree\n", encoding="utf-8")
    with (tmp_path / "text").open("rb", buffering=0) as file:

        def read() -> tuple[bytes, list[int], float]:
            kept.append(2)
            print("a line")
            os.write(1, b"another line")
            return file.readline(), kept, float(torch.ones(10**6).sum())

        assert called_in_copy(read, 30) == (b"one\n", [1, 2], 10**6)
        assert file.readline() == b"one\n"
    assert kept == [1]
    assert capfd.readouterr() == ("", "")


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8")


def _fail() -> Any:
    raise ValueError


@pytest.mark.parametrize(
    "function", [_fail, threading.Lock, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: time.sleep(100)]
)
def test_result_of_a_failed_copy_is_none(function: Any) -> None:
    children = _children()
    begin = time.monotonic()
    assert called_in_copy(function, 0.5) is None
    assert time.monotonic() - begin < 20
    assert _children() == children


def test_large_results_arrive() -> None:
    assert called_in_copy(lambda: bytes(10**7), 30) == bytes(10**7)
