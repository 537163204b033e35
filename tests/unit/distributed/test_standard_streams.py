"""Standard streams: writes to closed, full and stopped descriptors."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.distributed import standard_streams

STALL_SECONDS = 0.2


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Read end and write end of a pipe."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def stream(descriptor: int, stall_seconds: float | None = STALL_SECONDS) -> io.TextIOWrapper:
    return standard_streams._protected(None, descriptor, stall_seconds)  # type: ignore[return-value]


def fill(write: int) -> int:
    """Fill a pipe; return the number of bytes."""
    os.set_blocking(write, False)
    size = 0
    with pytest.raises(BlockingIOError):
        while True:
            size += os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    return size


def test_closed_pipe_is_no_error_and_later_output_goes_to_the_null_device() -> None:
    read, write = os.pipe()
    os.close(read)
    output = stream(write)
    print("text", file=output)
    print("text", file=output)
    assert os.readlink(f"/proc/self/fd/{write}") == os.devnull
    assert output.buffer.error is None  # type: ignore[attr-defined]
    os.close(write)


def test_full_device_is_recorded_and_stays() -> None:
    with open("/dev/full", "wb") as full:
        output = stream(full.fileno())
        print("text", file=output)
        assert output.buffer.error.errno == errno.ENOSPC  # type: ignore[attr-defined]
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"


def test_output_for_a_stopped_reader_is_dropped_and_counted(pipe: tuple[int, int]) -> None:
    read, write = pipe
    size = fill(write)
    output = stream(write)
    print("lost", file=output)
    print("lost", file=output)
    assert os.read(read, size) == b"x" * size
    print("seen", file=output)
    text = os.read(read, 1000).decode()
    assert "10 bytes" in text
    assert text.endswith("\nseen\n")


@pytest.mark.parametrize("is_blocking", [True, False])
def test_text_longer_than_a_pipe_is_complete(is_blocking: bool, tmp_path: Path) -> None:
    """Also if another process has made the pipe non-blocking."""
    read, write = os.pipe()
    os.set_blocking(write, is_blocking)
    with (tmp_path / "text").open("wb") as file, subprocess.Popen(["cat"], stdin=read, stdout=file) as reader:
        os.close(read)
        print("y" * 200_000, file=stream(write, None))
        os.close(write)
        assert reader.wait(30) == 0
    assert (tmp_path / "text").read_bytes() == b"y" * 200_000 + b"\n"


def test_closed_descriptors_are_opened() -> None:
    code = (
        "import os\nfrom samestep.distributed.standard_streams import *\nopen_standard_descriptors()\n"
        "assert [os.readlink(f'/proc/self/fd/{n}') for n in range(3)] == [os.devnull] * 3\n"
        "protect_output(stdout_seconds=None)\nprint('text')\nassert lost_output() is None\nos._exit(7)"
    )
    command = f'exec {sys.executable} -c "{code}" 0<&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command], timeout=60, check=False).returncode == 7
