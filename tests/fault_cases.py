"""The faults that are tried, and what is expected of each."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from started import as_torchrun, free_port
from system import Running, flip_bit, steps_saved

TESTS = Path(__file__).parent
RECIPE = TESTS / "faulty.yaml"
LOOP = TESTS / "faulty_loop.py"
RUN = Path("runs/a")
PORT = free_port()

_taken: list[socket.socket] = []

Act = Callable[[Running, Path], None]


@dataclass(frozen=True)
class Case:
    """One fault in one run of four ranks.

    Attributes:
        fault: what is done to whom.
        brought: what goes into `fault.json`: kind, rank and step.
        options: of the command besides.
        act: what is done from outside while it runs.
        before: what is done to the folder before it starts.
        code: what the command exits with; 0 where it recovers by itself.
        told: what the first line of its report is, as a regular expression; empty where there is no report.
        also: what else must be in what it says.
        resume_on: the number of ranks on which what has ended is resumed, to the same weights.
        command: what is run; the recipe by default.
        variables: what it finds in its environment besides.
        is_quick: it is tried with every change.
        is_variant: it is much like another one, and tried by `make faults` alone.
    """

    fault: str
    brought: dict[str, object] | None = None
    options: tuple[object, ...] = ()
    act: Act | None = None
    before: Callable[[Path], None] | None = None
    code: int = 0
    told: str = ""
    also: tuple[str, ...] = ()
    resume_on: int = 3
    command: tuple[object, ...] = ("train", RECIPE, "--name", "a")
    variables: Mapping[str, str] = field(default_factory=dict)
    is_quick: bool = False
    is_variant: bool = False

    @property
    def expected(self) -> str:
        """In words, for the table."""
        if self.code == 0:
            return "goes on to the same weights"
        ends = {1: "report within 10 s", 2: "refused", 130: "ends on request", -9: "all processes end"}[self.code]
        return f"{ends}; resumed to the same weights"


def in_step(kind: str, rank: int = 2, step: int = 7) -> dict[str, object]:
    """A fault in the training call of a rank's loss."""
    return {"kind": kind, "rank": rank, "step": step}


def step_of(place: Path, rank: int = 0) -> int:
    """The step that a rank has come to."""
    file = place / f"step-of-{rank}"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return int(text or 0)


def signalled(number: signal.Signals, *, again: signal.Signals | None = None, group: bool = False) -> Act:
    """Send the launcher, or its whole group, a signal in step 5 or after."""

    def act(running: Running, place: Path) -> None:
        running.until(lambda: step_of(place) >= 5, "step 5")
        fire(place)
        for each in filter(None, (number, again)):
            (running.kill_group if group else running.kill)(each)
            time.sleep(0.1)

    return act


def fire(place: Path) -> None:
    """Note the moment at which the fault happens."""
    (place / "fired.json").touch()


def stop_in_evaluation(running: Running, place: Path) -> None:
    """Ask it to end while a rank is slow to evaluate."""
    running.until((place / "fired.json").exists, "the evaluation")
    running.kill(signal.SIGTERM)


def stop_for_a_while(running: Running, place: Path) -> None:
    """Stop the launcher, which must not matter to its ranks."""
    signalled(signal.SIGSTOP)(running, place)
    time.sleep(1)
    running.kill(signal.SIGCONT)


def kill_server(running: Running, place: Path) -> None:
    """Kill the process that ranks are forks of."""
    running.until(lambda: step_of(place) >= 5, "step 5")
    ranks = [process for process in running.processes() if "samestep-board" in _maps(process)]
    parents = {_parent(process) for process in ranks} - {running.launcher}
    server = next(process for process in parents if process in ranks or process in running.processes())
    fire(place)
    running.kill_process(server, signal.SIGKILL)


def damaged_then_killed(how: Callable[[Path], None]) -> Act:
    """Damage the newest checkpoint, and then kill a rank."""

    def act(running: Running, place: Path) -> None:
        running.until(lambda: len(steps_saved(place / RUN)) > 1, "two checkpoints")
        step = steps_saved(place / RUN)[-1]
        how(place / RUN / f"checkpoints/step-{step:09d}/model.safetensors")
        (place / "fault.json").write_text(json.dumps(in_step("kill", 1, 10)), encoding="utf-8")
        (place / "pace").unlink()

    return act


def truncate(path: Path) -> None:
    """Leave half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Turn one bit of a file over."""
    flip_bit(path, 4001)


def leftovers(place: Path) -> None:
    """What runs that were killed have left, in the folder and beside it."""
    (place / "loop/.writing-step-000000004-1").mkdir(parents=True)
    (place / "loop/.writing-step-000000004-1/model.safetensors").write_bytes(b"half")
    (place / "loop/.lock").write_text("999999", encoding="utf-8")


def paced(pace: str) -> Callable[[Path], None]:
    """Let steps take so many seconds, of all ranks, or of the one named after it."""

    def before(place: Path) -> None:
        (place / "pace").write_text(pace, encoding="utf-8")

    return before


def take_port(place: Path) -> None:
    """Listen where ranks are told to meet, as long as this process runs."""
    if not _taken:
        _taken.append(socket.create_server(("127.0.0.1", PORT)))


def another_run(running: Running, place: Path) -> None:
    """A second command in the same folder, which is refused and does no harm."""
    running.until(lambda: bool(steps_saved(place / RUN)), "a checkpoint")
    with Running("resume", place / RUN, "--processes", 2, cwd=place) as other:
        done = other.wait(30)
    assert done.code == 2, done.err
    assert "process" in done.err
    (place / "pace").unlink()


def _maps(process: int) -> str:
    try:
        return Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
    except OSError:
        return ""


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def loop(kind: str, rank: int, step: int, check_every: int, *more: object) -> tuple[object, ...]:
    """The command that runs the loop of one's own."""
    return ("run", "--processes", 4, *more, LOOP, kind, rank, step, check_every)


SAVING = ("--checkpoint-every", 3)
HANG = ("--hang-after", "2s")
RESTART = ("--max-restarts", 2)

CASES = [
    *(
        Case(
            f"rank {rank} is killed in a step",
            in_step("kill", rank),
            code=1,
            told=f"error: rank {rank} was killed by SIGKILL in engine.step 7",
            is_quick=rank == 2,
            is_variant=rank in (1, 3),
        )
        for rank in range(4)
    ),
    *(
        Case(
            f"rank {rank} is killed, restarts allowed",
            in_step("kill", rank, 8),
            RESTART,
            also=(f"restart 1 of 2, on 4 processes: rank {rank} was killed by SIGKILL in engine.step 8",),
            is_variant=rank != 0,
        )
        for rank in (0, 3)
    ),
    Case(
        "rank 1 is lost, 2 to 4 processes allowed",
        in_step("kill", 1, 8),
        (*RESTART, "--processes", "2:4"),
        before=paced("0.2"),
        also=("restart 1 of 2, on 3 processes", "a checkpoint is there: going on with 4 processes"),
        is_quick=True,
    ),
    Case("the launcher is killed", act=signalled(signal.SIGKILL), code=-9, resume_on=2, is_quick=True),
    Case("the launcher is stopped and goes on", act=stop_for_a_while, is_variant=True),
    Case(
        "the fork server is killed",
        act=kill_server,
        code=1,
        told=r"error: the fork server of the ranks was killed (in|after) engine\.",
    ),
    Case("Ctrl-C", act=signalled(signal.SIGINT, group=True), code=130, resume_on=1),
    Case(
        "Ctrl-C twice",
        brought=in_step("sleep", 2, 5),
        act=signalled(signal.SIGINT, again=signal.SIGINT, group=True),
        code=130,
        told="error: stopped ",
    ),
    Case(
        "SIGTERM to the whole group", act=signalled(signal.SIGTERM, group=True), code=130, resume_on=4, is_variant=True
    ),
    Case("SIGUSR1 to the launcher", act=signalled(signal.SIGUSR1), code=130, is_variant=True),
    Case("the terminal is closed (SIGHUP)", act=signalled(signal.SIGHUP, group=True), code=130),
    Case(
        "SIGTERM, and a rank that takes longer than --grace",
        in_step("sleep", 2, 5),
        ("--grace", "1s"),
        act=signalled(signal.SIGTERM),
        code=130,
        told="error: stopped before the end of a step within the grace time of 1 s",
    ),
    Case(
        "rank 2 is stopped (SIGSTOP)", in_step("stop"), HANG, code=1, told="error: rank 2 does not come: nothing has "
    ),
    Case(
        "rank 0 is stopped (SIGSTOP)",
        in_step("stop", 0),
        HANG,
        code=1,
        told="error: rank 0 does not come: nothing ",
        is_variant=True,
    ),
    Case("rank 2 is stopped, restarts allowed", in_step("stop"), (*HANG, *RESTART), also=("restart 1 of 2",)),
    Case("rank 2 is stopped for a while", in_step("pause"), ("--hang-after", "8s"), is_variant=True),
    Case(
        "rank 2 hangs in a step",
        in_step("sleep"),
        HANG,
        code=1,
        told="error: rank 2 does not come: nothing has happened for ",
        also=("rank 2: in engine.step 7", "ranks 0, 1 and 3: in engine.step 7, waiting in ", "faulty.py:"),
        is_quick=True,
    ),
    Case(
        "a rank hangs in its data",
        {"kind": "data that never comes", "rank": "any"},
        (*HANG, "--workers", 0),
        code=1,
        told=r"error: rank \d does not come: nothing has happened for ",
        also=("__getitem__",),
    ),
    Case("rank 2 is slow", before=paced("1.2 2"), also=("rank 2 is slow: 1.2",)),
    Case(
        "rank 1 raises",
        in_step("raise", 1),
        code=1,
        told="error: rank 1 failed in engine.step 7: ArithmeticError: the sum does not add up",
        is_quick=True,
    ),
    Case(
        "rank 1 raises, restarts allowed",
        in_step("raise", 1),
        RESTART,
        also=("restart 1 of 2, on 4 processes",),
        is_variant=True,
    ),
    Case(
        "rank 3 raises in evaluation",
        {"kind": "raise in evaluation", "rank": 3},
        code=1,
        told="error: rank 3 failed in engine.evaluate: ArithmeticError",
    ),
    Case("SIGTERM in evaluation", {"kind": "wait in evaluation", "rank": 1}, act=stop_in_evaluation, code=130),
    Case(
        "rank 1 calls sys.exit(0)",
        in_step("sys.exit(0)", 1),
        code=1,
        told="error: rank 1 ended with exit code 0 ",
        is_variant=True,
    ),
    Case("rank 1 calls sys.exit(3)", in_step("sys.exit(3)", 1), code=1, told="error: rank 1 ended with exit code 3 "),
    Case(
        "rank 1 calls os._exit(5)",
        in_step("os._exit(5)", 1),
        code=1,
        told="error: rank 1 ended with exit code 5 ",
        is_variant=True,
    ),
    Case(
        "rank 2: segmentation fault",
        in_step("segmentation fault"),
        code=1,
        told="error: rank 2 was killed by SIGSEGV in engine.step 7",
        also=("string_at",),
    ),
    Case(
        "rank 2: abort()",
        in_step("abort"),
        code=1,
        told="error: rank 2 was killed by SIGABRT in engine.step 7",
        is_variant=True,
    ),
    Case(
        "rank 2 runs into a memory limit",
        in_step("memory limit"),
        code=1,
        told="error: rank 2 failed in engine.step 7: RuntimeError: .*memory",
        also=("let each rank hold less at once",),
    ),
    Case("a loss on rank 1 is not a number", in_step("not a number", 1), code=1, told="error: step 7: .*shard 1"),
    Case(
        "a bit of the weights changes on rank 2",
        in_step("drift"),
        ("--check-every", 1),
        code=1,
        told="error: .*rank 2 no longer holds what ranks 0, 1 and 3 hold",
    ),
    Case(
        "a bit of the weights changes on rank 2, restarts allowed",
        in_step("drift"),
        ("--check-every", 1, *RESTART),
        also=("restart 1 of 2, on 4 processes",),
        is_variant=True,
    ),
    Case(
        "a loader's worker is killed",
        {"kind": "kill a worker", "rank": "any"},
        ("--workers", 1),
        code=1,
        # By who notices it first, the signal's handler or the queue.
        told=r"error: rank \d failed .*worker .*(killed|exited unexpectedly)",
    ),
    Case(
        "a sample is corrupt",
        {"kind": "bad sample", "rank": "any"},
        ("--workers", 0),
        code=1,
        told=r"error: rank \d failed .*ValueError: the image file is truncated",
        also=("while sample 40 of the dataset was made",),
    ),
    *(
        Case(
            f"rank 0 is killed while it saves, at {call}",
            in_step(f"kill at {call}", 0, 5),
            RESTART,
            also=("restart 1 of 2, on 4 processes: rank 0 was killed by SIGKILL",),
            is_variant=call != "rename",
        )
        for call in ("fsync", "rename", "replace")
    ),
    Case(
        "the disk takes no more (file size limit)",
        in_step("file size limit", 0),
        code=1,
        told=r"error: the checkpoint of step \d+ cannot be written .*File too large",
        is_variant=True,
    ),
    Case(
        "the disk is full",
        in_step("disk full", 0, 5),
        code=1,
        told=r"error: the checkpoint of step \d+ cannot be written .*No space left on device",
    ),
    Case(
        "the disk becomes read-only",
        in_step("disk read-only", 0, 5),
        code=1,
        told=r"error: the checkpoint of step \d+ cannot be written .*Read-only file system",
    ),
    Case("the folder of checkpoints is lost", in_step("folder lost", 0), code=1, told="error: .*", resume_on=0),
    Case(
        "a bit of the newest checkpoint flips, then a rank is killed",
        options=RESTART,
        act=damaged_then_killed(flip),
        before=paced("0.4"),  # so that there is time to damage it
        also=("restart 1 of 2, on 4 processes: rank 1 was killed by SIGKILL in engine.step 10",),
    ),
    Case(
        "the newest checkpoint is cut short, then a rank is killed",
        options=RESTART,
        act=damaged_then_killed(truncate),
        before=paced("0.4"),  # so that there is time to damage it
        also=("restart 1 of 2, on 4 processes: rank 1 was killed by SIGKILL in engine.step 10",),
        is_variant=True,
    ),
    Case("a second run in the same folder", act=another_run, before=paced("1.5")),
    *(
        Case(
            f"{what}, ranks checked",
            command=loop(what, 2, 6, 1),
            code=1,
            told="error: after engine.step [67], rank 2 went another way than the others:",
            is_variant=what in ("skip", "other dtype"),
        )
        for what in ("fewer batches", "skip", "other shape", "other dtype", "extra barrier")
    ),
    Case(
        "fewer batches, ranks not checked",
        command=loop("fewer batches", 2, 6, 0, *HANG),
        code=1,
        told="error: rank 2 does not come: nothing has happened for ",
        is_variant=True,
    ),
    Case(
        "fewer batches, restarts allowed",
        command=loop("fewer batches", 2, 6, 1, *RESTART),
        also=("restart 1 of 2, on 4 processes: after engine.step",),
    ),
    Case(
        "under torchrun's variables, their port is taken",
        before=take_port,
        variables=as_torchrun(PORT)(0, 2),
        code=2,
        told=f"error: port {PORT} at 127.0.0.1 is taken",
    ),
    Case("stale files of killed runs", command=loop("", 0, 0, 0), before=leftovers),
]
