"""Runs the `samestep` command in separate processes, and reads the files of its runs."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, TextIO
from uuid import uuid4

import pytest

from samestep.checkpoint.durable_files import linked_name
from samestep.cli.main import main

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"
# Import path of commands that run this checkout, whatever is installed.
IMPORT_PATH = os.pathsep.join(map(str, (SOURCES, TESTS)))
COMMAND = (sys.executable, "-m", "samestep")
_MARK = "SAMESTEP_TEST_MARK"


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def samestep(*arguments: object, cwd: Path) -> Done:
    """Run the command to its end in the folder `cwd`, as `here`; return its output, and that of rank 0."""
    begins = [os.fstat(file.fileno()).st_size for file in output_files()]
    with output_to_files(), _text(1) as out, _text(2) as err, redirect_stdout(out), redirect_stderr(err):
        try:
            code = here(*arguments, cwd=cwd)
        except SystemExit as end:  # after --help
            code = int(end.code or 0)
    return Done(code, *(_read_from(file, begin) for file, begin in zip(output_files(), begins, strict=True)))


@cache
def output_files() -> tuple[IO[bytes], IO[bytes]]:
    """Return the files of standard output and error of ranks that the fork server of the tests starts."""
    out, err = (tempfile.TemporaryFile("a+b", buffering=0) for _ in range(2))  # noqa: SIM115
    return out, err


@contextmanager
def output_to_files() -> Iterator[None]:
    """Let this process, and those that it starts, write standard output and error to `output_files`."""
    descriptors = (1, 2)
    before = [os.dup(descriptor) for descriptor in descriptors]
    try:
        for file, descriptor in zip(output_files(), descriptors, strict=True):
            os.dup2(file.fileno(), descriptor)
        yield
    finally:
        for kept, descriptor in zip(before, descriptors, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)


def _text(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", closefd=False)


def _read_from(file: IO[bytes], begin: int) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size - begin, begin).decode()


def here(*arguments: object, cwd: Path) -> int:
    """Run the command in this process, so that one fork server imports for all runs of a file; return the exit code.

    Without a number of processes, training uses one on every machine.
    """
    with chdir(cwd):
        return main(with_processes(arguments))


def with_processes(arguments: Sequence[object]) -> list[str]:
    """Return the arguments of a command; those of a training without a number of processes with one process."""
    texts = [str(argument) for argument in arguments]
    if texts[:1] in (["train"], ["resume"]) and not {"--processes", "--devices", "--help"} & set(texts):
        texts[1:1] = ["--processes", "1"]
    return texts


class Running:
    """A command in a separate session; leaving the block kills all of its processes.

    Args:
        terminal: descriptor of its output, in place of files.
        variables: further variables of its environment.
        command: the command before the arguments, such as a shell in which a pipeline runs.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path,
        terminal: int | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._mark = uuid4().hex
        self._stack = ExitStack()
        self._files = [self._stack.enter_context(file) for file in map(tempfile.TemporaryFile, ("w+b", "w+b"))]
        out, err = self._files if terminal is None else (terminal, terminal)
        self._process = subprocess.Popen(
            [*command, *with_processes(arguments)],
            cwd=cwd,
            env=environment() | {_MARK: self._mark, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes():
            _kill(process, signal.SIGKILL)
        self._process.wait()
        self._stack.close()

    @property
    def launcher(self) -> int:
        """Process id of the launcher, and of its session and process group."""
        return self._process.pid

    def processes(self) -> list[int]:
        """Return all processes with its environment, descendants of any kind."""
        return [process for process in _processes() if self._mark in _environment_of(process)]

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        _kill(self.launcher, number)

    def kill_process(self, process: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        assert process in self.processes()
        _kill(process, number)

    def try_kill_process(self, process: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes, which may have ended by now."""
        _kill(process, number)

    def is_running(self) -> bool:
        """Return whether the launcher still runs."""
        return self._process.poll() is None

    def kill_group(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, as a terminal or a batch system does."""
        os.killpg(self.launcher, number)

    def wait(self, timeout: float) -> Done:
        """Wait for the end, which must come within `timeout` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            out, err = self._read()
            raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
        return Done(code, *self._read())

    def must_run(self) -> None:
        """Fail if it ended already."""
        code = self._process.poll()
        assert code is None, f"ended early with {code}:\n" + "\n".join(self._read())

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 60) -> None:
        """Wait for a condition while it runs."""

        def holds() -> bool:
            if condition():
                return True
            self.must_run()
            return False

        until(holds, what, timeout)

    @property
    def errors(self) -> str:
        """Standard error so far; the processes share the position in the file, which must not move."""
        descriptor = self._files[1].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def _read(self) -> tuple[str, str]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], texts[1]


def without_warnings(text: str) -> list[str]:
    """Return the lines of an output without those about the small batches and the divided calls of test recipes."""
    lines = text.replace(": some calls ", ": calls ").splitlines()
    return [line for line in lines if not line.startswith("warning: batch norm") and ": calls " not in line]


def answer(capture: pytest.CaptureFixture[str]) -> Any:
    """Return the JSON output of a command run by `here(..., "--json")`."""
    out, errors = capture.readouterr()
    assert out, errors
    return json.loads(out)


def environment() -> dict[str, str]:
    """Return the environment of a command, in which recipes can name modules of the tests."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The terminal determines its size; pytest-xdist gives its processes a terminal of 80 columns.
    bare = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**bare, "PYTHONPATH": os.pathsep.join(path)}


def until(condition: Callable[[], Any], what: str, timeout: float, instead: Callable[[], object] = str) -> None:
    """Wait for a condition; fail after `timeout` seconds, with the result of `instead` in the message."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{instead()}"
        time.sleep(0.02)


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the complete events of a run, or those of one kind."""
    path = run / "events.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    found = [json.loads(line) for line in whole.splitlines()]
    return [event for event in found if kind in (None, event["event"])]


def weights(run: Path, which: str = "last") -> tuple[str, str]:
    """Return the SHA-256 of a checkpoint's model and optimizer state."""
    folder = run / "checkpoints" / which
    names = ("model.safetensors", "optimizer.safetensors")
    model, optimizer = (hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names)
    return model, optimizer


def steps_saved(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def last_saved(run: Path) -> int:
    """Return the step from which a killed run continues, 0 without a checkpoint; a save writes this link last."""
    name = linked_name(run / "checkpoints" / "last")
    return int(name.removeprefix("step-")) if name else 0


def state_of(run: Path, which: str = "last") -> dict[str, Any]:
    """Return the progress in a checkpoint."""
    text = (run / "checkpoints" / which / "state.json").read_text(encoding="utf-8")
    progress: dict[str, Any] = json.loads(text)["progress"]
    return progress


def tree(folder: Path) -> dict[str, str]:
    """Return every path below `folder`, with the hash of its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_plain = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_plain else ""
    return found


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file; `bit` counts from the beginning, modulo the length."""
    data = bytearray(path.read_bytes())
    place = bit % (8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def arguments_of(process: int) -> list[str]:
    """Return the command line of a process; empty if the process has ended or is in `execve`."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _kill(process: int, number: signal.Signals) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        return  # it has ended
