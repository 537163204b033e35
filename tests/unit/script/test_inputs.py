"""Inputs that are equal on all ranks: random bytes, standard input, results of programs."""

import bdb
import getpass
import logging
import multiprocessing
import os
import pdb
import pty
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import samestep
from helpers.system import environment
from samestep.distributed.rng import seed_generators
from samestep.distributed.status import local_rank_status
from samestep.errors import InputError, RunError
from samestep.script.inputs import equal_entropy, shared_console
from samestep.script.programs import FirstRankPrograms

# --- random bytes ---

SEED = b"sixteen bytes or"


def _seeded(seed: Callable[[], Any], draw: Callable[[], Any]) -> Any:
    seed()
    return draw()


DRAWS: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random().random(),
    "random.seed": lambda: _seeded(random.seed, random.random),
    "random.seed(None)": lambda: _seeded(lambda: random.seed(None), random.random),
    "SystemRandom": lambda: random.SystemRandom().random(),
    "default_rng": lambda: numpy.random.default_rng().random(),
    "SeedSequence": lambda: numpy.random.SeedSequence().entropy,
    "RandomState": lambda: numpy.random.RandomState().random_sample(),
    "MT19937": lambda: numpy.random.MT19937().random_raw(),
    "numpy.random.seed": lambda: _seeded(numpy.random.seed, numpy.random.random_sample),
    "numpy.random.seed(None)": lambda: _seeded(lambda: numpy.random.seed(None), numpy.random.random_sample),
    "torch.seed": lambda: (torch.seed(), torch.rand(2).tolist()),
    "torch.random.seed": lambda: (torch.random.seed(), torch.rand(2).tolist()),
    "uuid4": uuid.uuid4,
    "uuid1": lambda: [uuid.uuid1()],
    "secrets": lambda: (secrets.token_hex(), secrets.randbelow(10**12), secrets.choice(range(10**9))),
    "os.urandom": lambda: os.urandom(200),
}


def twice(draw: Callable[[], Any], seed: bytes = SEED) -> list[Any]:
    numpy.random.seed(0)  # a seed from the operating system keeps the position of NumPy's generator
    with equal_entropy(seed, {}):
        return [draw() for _ in range(2)]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_are_a_function_of_the_seed_inside_the_block(draw: Callable[[], Any]) -> None:
    first, second = twice(draw)
    assert first != second
    assert twice(draw) == [first, second]
    assert twice(draw, b"another seed....") != [first, second]
    assert draw() != draw()


def test_generators_are_restored() -> None:
    owners = (os, uuid, random, random.Random, numpy.random, torch, torch.random)
    before = [dict(vars(owner)) for owner in owners]
    with equal_entropy(SEED, {}):
        assert [dict(vars(owner)) for owner in owners] != before
    assert [dict(vars(owner)) for owner in owners] == before


def test_draws_of_other_lines_are_equal_after_a_draw_on_one_rank() -> None:
    def rank(number: int) -> list[Any]:
        with equal_entropy(SEED, {}):
            if number == 0:
                numpy.random.default_rng()
            return [numpy.random.default_rng().random(), uuid.uuid4()]

    assert rank(0) == rank(1)


def test_seeded_generators_stay_as_they_are() -> None:
    def seeded() -> list[Any]:
        random.seed("text")
        numpy.random.seed(3)
        torch.manual_seed(4)
        return [random.random(), random.Random(5).random(), numpy.random.random_sample(), torch.rand(1).item()]

    before = seeded()
    with equal_entropy(SEED, {}):
        assert seeded() == before


def test_version_and_subclass_of_random_are_kept() -> None:
    class Own(random.Random):
        pass

    with equal_entropy(SEED, {}):
        draws = [Own(3).random(), random.Random(3).random()]
        own = random.Random()
        own.seed("text", version=1)
    expected = random.Random()
    expected.seed("text", version=1)
    assert draws[0] == draws[1]
    assert own.random() == expected.random()


def test_other_threads_and_names_of_temporary_files_are_random() -> None:
    drawn: list[bytes] = []

    def draw() -> None:
        drawn.append(os.urandom(16))

    for _ in range(2):
        with equal_entropy(SEED, {}):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
            sequence: Any = tempfile._RandomNameSequence()  # type: ignore[attr-defined]
            drawn.append(next(sequence))
    assert len(set(drawn)) == 4


def test_last_seeds_are_recorded_with_their_lines() -> None:
    seeds: dict[str, Any] = {}
    with equal_entropy(SEED, seeds):
        torch.manual_seed(1)
        torch.random.manual_seed(seed=2)
        random.seed(1.5)
        numpy.random.seed(7)
        numpy.random.seed()
    assert {name: value for name, (_, value) in seeds.items()} == {
        "torch.manual_seed": "2",
        "random.seed": "1.5",
        "numpy.random.seed": "7",
    }
    assert all(line[0] == __file__ for line, _ in seeds.values())
    assert seeds["numpy.random.seed"][0][1] == seeds["random.seed"][0][1] + 1


def test_seeds_of_samples_are_not_recorded() -> None:
    seeds: dict[str, Any] = {}
    with equal_entropy(SEED, seeds):
        random.seed(3)
        seed_generators(4)
    assert [(name, value) for name, (_, value) in seeds.items()] == [("random.seed", "3")]


def _child(connection: Any) -> None:
    connection.send(os.urandom(8).hex())


def _rank(folder: Path) -> list[Any]:
    """Draw on a rank, and use what needs names of its own; return the draws of all ranks."""
    world = samestep.init(device="cpu")
    with equal_entropy(SEED, {}):
        equal = [str(uuid.uuid4()), random.Random().random(), numpy.random.default_rng().random(), hash("text")]
        torch.manual_seed(0)
        equal.append(len({"a", "b", "c"}))
        own = [tempfile.mkdtemp(dir=folder)]
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            own.append(file.name)
        memory = SharedMemory(create=True, size=8)
        own.append(memory.name)
        semaphores = [multiprocessing.get_context("fork").Lock() for _ in range(20)]
        receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_child, args=(send,))
        child.start()
        own.append(receive.recv())
        child.join()
        with multiprocessing.get_context("spawn").Manager() as manager:  # a socket, and keys of both sides
            shared = manager.list([world.rank])
            equal.append(len(shared))
        world.barrier()
        memory.close()
        memory.unlink()
        assert len(semaphores) == 20
    return list(samestep.all_gather([equal, own], world))


@pytest.mark.slow
def test_ranks_draw_equal_numbers_and_have_own_names(tmp_path: Path) -> None:
    ranks = samestep.launch(_rank, tmp_path, processes=3)
    equal, own = zip(*ranks, strict=True)
    assert equal[0] == equal[1] == equal[2]
    assert all(len(set(names)) == 3 for names in zip(*own, strict=True))


# --- standard input ---

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


def test_debuggers_are_refused() -> None:
    def post_mortem() -> None:
        try:
            raise ValueError
        except ValueError as error:
            pdb.post_mortem(error.__traceback__)

    for call in (pdb.set_trace, lambda: pdb.Pdb().set_trace(), sys.__breakpointhook__, post_mortem):
        assert "a debugger, in a script on several processes" in refused(call).value


def test_passwords_are_refused() -> None:
    assert "getpass, which asks at the terminal of each process" in refused(lambda: getpass.getpass("A")).value


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
    before = (sys.stdin, getpass.getpass, bdb.Bdb.set_trace, pdb.Pdb.interaction, os.fstat(0))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with descriptor_0(b""), shared_console(rank, size, lambda message: b""):
            assert sys.stdin is not before[0]
    assert (sys.stdin, getpass.getpass, bdb.Bdb.set_trace, pdb.Pdb.interaction, os.fstat(0)) == before


def test_one_process_has_plain_input() -> None:
    with descriptor_0(b"a\nb\n"), shared_console(0, 1, lambda _: b""):
        assert sys.stdin.fileno() == 0
        assert [input(), sys.stdin.read()] == ["a", "b\n"]


PROGRAM = """
import sys
from pathlib import Path
import samestep
from samestep.script.inputs import shared_console

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


# --- programs ---

APPEND = "echo line >> log.txt"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FirstRankPrograms]:
    """Two ranks in one process, of which the first runs before the second."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return [FirstRankPrograms(rank, str(folder), local_rank_status(), lambda: False) for rank in range(2)]


def test_program_runs_once(ranks: list[FirstRankPrograms]) -> None:
    for rank in ranks:
        with rank.installed():
            codes = [os.system(APPEND), os.system(APPEND)]
            codes.append(subprocess.run(APPEND, shell=True, check=True).returncode)
        assert codes == [0] * 3
    assert Path("log.txt").read_text(encoding="utf-8") == "line\n" * 3


@pytest.mark.parametrize("is_text", [True, False])
def test_output_is_that_of_rank_0(ranks: list[FirstRankPrograms], is_text: bool) -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getpid()); print('no', file=sys.stderr); sys.exit(3)"]
    done = []
    for rank in ranks:
        with rank.installed():
            done.append(subprocess.run(command, capture_output=True, text=is_text, check=False))
    first, second = done
    assert first.returncode == second.returncode == 3
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)
    assert first.stderr == ("no\n" if is_text else b"no\n")


def test_functions_of_subprocess_use_it(ranks: list[FirstRankPrograms]) -> None:
    seen: list[Any] = []
    for rank in ranks:
        with rank.installed():
            code = subprocess.call(APPEND, shell=True)
            text = subprocess.check_output("cat log.txt; echo $$", shell=True, text=True)
            seen.append((code, text, subprocess.getoutput("cat log.txt")))
    assert seen[0] == seen[1]
    assert Path("log.txt").read_text(encoding="utf-8") == "line\n"


@pytest.mark.parametrize(
    ("command", "options", "kind"),
    [
        ("exit 4", {"shell": True, "check": True}, subprocess.CalledProcessError),
        ("sleep 5", {"shell": True, "timeout": 0.05}, subprocess.TimeoutExpired),
        (["no-such-program"], {}, FileNotFoundError),
        ("printf '\\377'", {"shell": True, "capture_output": True, "text": True}, UnicodeDecodeError),
    ],
)
def test_errors_are_those_of_rank_0(
    ranks: list[FirstRankPrograms], command: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    errors = []
    for rank in ranks:
        with pytest.raises(kind) as raised, rank.installed():
            subprocess.run(command, **options)  # noqa: PLW1510
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_started_programs_are_named_once_on_rank_0(
    ranks: list[FirstRankPrograms], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("samestep"), "propagate", True)
    caplog.set_level(logging.INFO, "samestep")
    before = (subprocess.Popen.__init__, subprocess.run, subprocess.call, os.system)
    for rank in ranks:
        with rank.installed():
            for _ in range(2):
                assert subprocess.Popen(["true", "x"]).wait() == 0
            subprocess.run(["true"], check=True)
            os.system("true")
    assert (subprocess.Popen.__init__, subprocess.run, subprocess.call, os.system) == before
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.partition(" ")[2] == "starts the program 'true', on every process"
    assert "test_inputs.py:" in message


def test_program_that_rank_0_has_passed_is_an_error_with_the_line(tmp_path: Path) -> None:
    programs = FirstRankPrograms(1, str(tmp_path), local_rank_status(), lambda: True)
    message = r"test_inputs\.py:\d+: the program did not run to its end on rank 0"
    with pytest.raises(RunError, match=message), programs.installed():
        os.system("true")
