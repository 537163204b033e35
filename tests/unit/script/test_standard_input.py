"""Standard input of the launcher on all ranks."""

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.system import environment
from samestep.errors import InputError
from samestep.script.standard_input import shared_console

Read = Callable[[], Any]


@contextmanager
def descriptor_0(data: bytes) -> Iterator[None]:
    """Give a pipe with data to descriptor 0."""
    source, sink = os.pipe()
    os.write(sink, data)
    os.close(sink)
    before = os.dup(0)
    os.dup2(source, 0)
    os.close(source)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def on_ranks(read: Read, data: bytes) -> tuple[Any, Any]:
    """Return what `read` returns on rank 0, with data in descriptor 0, and on rank 1, which has none."""
    messages: list[bytes] = []

    def send(message: bytes | None) -> bytes:
        assert message is not None
        messages.append(message)
        return message

    def receive(message: bytes | None) -> bytes:
        assert message is None
        return messages.pop(0)

    with descriptor_0(data), shared_console(0, 2, send):
        first = outcome(read)
    with descriptor_0(b"input of no rank\n"), shared_console(1, 2, receive):
        second = outcome(read)
        assert os.read(0, 1) == b"", "subprocesses would take input"
    assert not messages
    return first, second


def outcome(read: Read) -> Any:
    try:
        return read()
    except EOFError as error:
        return type(error), str(error)


def _loop() -> list[str]:
    return list(sys.stdin)


READS: dict[str, tuple[Read, bytes, Any]] = {
    "input": (lambda: [input("name? "), input()], b"Anna\nBen\n", ["Anna", "Ben"]),
    "readline": (lambda: [sys.stdin.readline() for _ in range(3)], b"1\n2", ["1\n", "2", ""]),
    "read": (lambda: [sys.stdin.read()], "größer\n".encode() * 5000, ["größer\n" * 5000]),
    "iteration": (_loop, b"a\nb\n", ["a\n", "b\n"]),
    "bytes": (lambda: [sys.stdin.buffer.read()], b"\xff\x00", [b"\xff\x00"]),
    "end": (input, b"", (EOFError, "EOF when reading a line")),
    "terminal": (lambda: [sys.stdin.isatty()], b"", [False]),
}


@pytest.mark.parametrize(("read", "data", "expected"), READS.values(), ids=READS)
def test_all_ranks_read_the_input_of_rank_0(read: Read, data: bytes, expected: Any) -> None:
    assert on_ranks(read, data) == (expected, expected)


def refused(call: Read) -> InputError:
    with pytest.raises(InputError) as caught, shared_console(0, 2, lambda message: message or b""):
        call()
    assert (caught.value.code, caught.value.exit_code, caught.value.fix) == (
        "E_LAUNCH",
        2,
        "samestep run --processes 1",
    )
    assert caught.value.value.startswith(f"{__file__}:")
    return caught.value


def test_threads_cannot_read() -> None:
    errors: list[InputError] = []

    def read() -> None:
        try:
            input()
        except InputError as error:
            errors.append(error)

    def start() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        raise errors[0]

    assert "read in a thread or a child process" in refused(start).value


def test_console_is_restored() -> None:
    before = (sys.stdin, os.fstat(0))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with descriptor_0(b""), shared_console(rank, size, lambda message: b""):
            assert sys.stdin is not before[0]
    assert (sys.stdin, os.fstat(0)) == before


def test_one_process_has_plain_input() -> None:
    with descriptor_0(b"a\nb\n"), shared_console(0, 1, lambda _: b""):
        assert sys.stdin.fileno() == 0
        assert [input(), sys.stdin.read()] == ["a", "b\n"]


PROGRAM = """
import sys
from pathlib import Path
import samestep
from samestep.script.standard_input import shared_console

def rank(folder, waits):
    world = samestep.init(device="cpu")
    def share(message):
        texts = samestep.all_gather(None if message is None else message.decode("latin-1"), world)
        return texts[0].encode("latin-1")
    with shared_console(world.rank, world.size, share):
        lines = [input("name? "), sys.stdin.readline().strip()]
        Path(folder, f"rank-{world.rank}").write_text(" ".join(lines))
        world.barrier()
        if waits:
            print("more?", flush=True)
            input()

if __name__ == "__main__":
    folder, *waits = sys.argv[1:]
    samestep.launch(rank, folder, bool(waits), processes=2, log_dir=Path(folder))
"""


def texts(folder: Path) -> list[str]:
    return [(folder / f"rank-{rank}").read_text(encoding="utf-8") for rank in range(2)]


@pytest.mark.slow
def test_pipe_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, tmp_path / "program.py", tmp_path]
    options: dict[str, Any] = {"input": "Anna\nBen\n", "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run(command, check=False, env=environment(), **options)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path) == ["Anna Ben"] * 2
    assert done.stdout == "name? "


@pytest.mark.slow
def test_terminal_of_the_launcher_and_its_interrupt(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, tmp_path / "program.py", tmp_path, "waits"], environment())
    shown = b""

    def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 1000)
        shown = shown.partition(text)[2]

    wait_for(b"name? ")
    os.write(terminal, b"Anna\nBen\n")
    wait_for(b"more?")
    assert texts(tmp_path) == ["Anna Ben"] * 2
    began = time.monotonic()
    os.write(terminal, b"\x03")
    wait_for(b"stopped")
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1  # the error of `samestep.launch` in a program
    assert time.monotonic() - began < 10
