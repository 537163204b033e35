"""Fault cases: the injected fault and the expected result of each."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helpers.started import as_torchrun, free_port
from helpers.system import Running, flip_bit, last_saved, steps_saved
from samestep.checkpoint.durable_files import write_atomically

TESTS = Path(__file__).parents[1]
RECIPE = TESTS / "helpers" / "faulty.yaml"
LOOP = TESTS / "helpers" / "faulty_loop.py"
RUN = Path("runs/a")
PORT = free_port()

_occupied: list[socket.socket] = []

Act = Callable[[Running, Path], None]


@dataclass(frozen=True)
class Case:
    """One fault in a run of four ranks.

    Attributes:
        fault: description of the fault, for the table.
        injected: contents of `fault.json`: kind, rank and step of a fault inside of a rank.
        options: further options of the command.
        act: called with the running command, for a fault from outside.
        prepare: called with the directory before the command starts.
        code: exit code of the command; 0 if the run recovers.
        report: regular expression for the first line of the report; empty if there is no report.
        output: further text in the output.
        resume_on: number of ranks of the resumed run; 0 if the lost checkpoint folder must be restored first.
        command: command and arguments; by default the recipe.
        variables: further environment variables.
        is_variant: similar to another case; executed by `make faults` and the long tests only.
    """

    fault: str
    injected: dict[str, object] | None = None
    options: tuple[object, ...] = ()
    act: Act | None = None
    prepare: Callable[[Path], None] | None = None
    code: int = 0
    report: str = ""
    output: tuple[str, ...] = ()
    resume_on: int = 3
    command: tuple[object, ...] = ("train", RECIPE, "--name", "a")
    variables: Mapping[str, str] = field(default_factory=dict)
    is_variant: bool = False


def in_step(kind: str, rank: int = 2, step: int = 7) -> dict[str, object]:
    """Return a fault inside the loss of a training step."""
    return {"kind": kind, "rank": rank, "step": step}


def inject(path: Path, fault: Mapping[str, object]) -> None:
    """Write `fault.json` at once: ranks may read it now."""
    write_atomically(path / "fault.json", json.dumps(fault))


def current_step(path: Path, rank: int = 0) -> int:
    """Return the current step of a rank."""
    file = path / f"step-of-{rank}"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return int(text or 0)


def signalled(number: signal.Signals, *, again: signal.Signals | None = None, group: bool = False) -> Act:
    """Return an action that sends a signal to the launcher, or to its process group, in step 5 or later."""

    def act(running: Running, path: Path) -> None:
        running.until(lambda: current_step(path) >= 5, "step 5")
        record_fault(path)
        for sent in filter(None, (number, again)):
            (running.kill_group if group else running.kill)(sent)
            time.sleep(0.1)

    return act


def record_fault(path: Path) -> None:
    """Record the time of the fault."""
    (path / "fired.json").touch()


def stop_in_evaluation(running: Running, path: Path) -> None:
    """Request a stop during a slow evaluation of one rank."""
    running.until((path / "fired.json").exists, "the evaluation")
    running.kill(signal.SIGTERM)


def pause_launcher(running: Running, path: Path) -> None:
    """Stop the launcher for a second; its ranks continue."""
    signalled(signal.SIGSTOP)(running, path)
    time.sleep(1)
    running.kill(signal.SIGCONT)


def kill_fork_server(running: Running, path: Path) -> None:
    """Kill the process from which ranks are forked."""
    running.until(lambda: current_step(path) >= 5, "step 5")
    ranks = [process for process in running.processes() if "samestep-board" in _maps(process)]
    parents = {_parent(process) for process in ranks} - {running.launcher}
    server = next(process for process in parents if process in ranks or process in running.processes())
    record_fault(path)
    running.kill_process(server, signal.SIGKILL)


def damage_and_kill(damage: Callable[[Path], None]) -> Act:
    """Return an action that damages the newest checkpoint and then kills a rank."""

    def act(running: Running, path: Path) -> None:
        running.until(lambda: len(steps_saved(path / RUN)) > 1, "two checkpoints")
        step = steps_saved(path / RUN)[-1]
        damage(path / RUN / f"checkpoints/step-{step:09d}/model.safetensors")
        inject(path, in_step("kill", 1, 10))
        (path / "pace").unlink()

    return act


def truncate(path: Path) -> None:
    """Truncate a file to half of its length."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Flip one bit of a file."""
    flip_bit(path, 4001)


def create_leftovers(path: Path) -> None:
    """Create the leftovers of killed runs in the checkpoint folder."""
    (path / "loop/.writing-step-000000004-1").mkdir(parents=True)
    (path / "loop/.writing-step-000000004-1/model.safetensors").write_bytes(b"half")
    (path / "loop/.lock").write_text("999999", encoding="utf-8")


def paced(pace: str) -> Callable[[Path], None]:
    """Return a preparation that slows steps down: `SECONDS` for all ranks, `SECONDS RANK` for one."""

    def prepare(path: Path) -> None:
        (path / "pace").write_text(pace, encoding="utf-8")

    return prepare


def occupy_port(path: Path) -> None:
    """Listen on the port of the rendezvous until this process ends."""
    if not _occupied:
        _occupied.append(socket.create_server(("127.0.0.1", PORT)))


def start_second_run(running: Running, path: Path) -> None:
    """Run a second command in the same directory, which is refused and changes nothing."""
    running.until(lambda: last_saved(path / RUN) > 0, "a checkpoint")
    with Running("resume", path / RUN, "--processes", 2, cwd=path) as other:
        done = other.wait(30)
    assert done.code == 2, done.err
    assert "process" in done.err
    (path / "pace").unlink()


def _maps(process: int) -> str:
    try:
        return Path(f"/proc/{process}/maps").read_text(encoding="utf-8")
    except OSError:
        return ""


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def loop(kind: str, rank: int, step: int, *options: object) -> tuple[object, ...]:
    """Return the command that runs the custom loop."""
    return ("run", "--processes", 4, *options, LOOP, kind, rank, step)


SAVING = ("--checkpoint-every", 3)
HANG = ("--hang-after", "3s")
RESTART = ("--max-restarts", 2)

CASES = [
    *(
        Case(
            f"rank {rank} is killed in a step",
            in_step("kill", rank),
            code=1,
            report=f"error: rank {rank} was killed by SIGKILL in step 7",
            is_variant=rank != 2,
        )
        for rank in (0, 2)
    ),
    Case(
        "rank 0 is killed, restarts allowed",
        in_step("kill", 0, 8),
        RESTART,
        output=("restart 1 of 2, on 4 processes: rank 0 was killed by SIGKILL in step 8",),
        is_variant=True,
    ),
    Case(
        "rank 1 is killed, 2 to 4 processes allowed",
        in_step("kill", 1, 8),
        (*RESTART, "--processes", "2:4"),
        prepare=paced("0.5"),
        output=("restart 1 of 2, on 3 processes",),
    ),
    Case(
        "the launcher is killed",
        prepare=paced("0.1"),
        act=signalled(signal.SIGKILL),
        code=-9,
        resume_on=2,
        is_variant=True,
    ),
    Case("the launcher is stopped and continues", act=pause_launcher, is_variant=True),
    Case(
        "the fork server is killed",
        act=kill_fork_server,
        code=1,
        report=r"error: the fork server of the ranks was killed (in|after) ",
        is_variant=True,
    ),
    Case(
        "Ctrl-C",
        prepare=paced("0.1"),
        act=signalled(signal.SIGINT, group=True),
        code=130,
        resume_on=1,
        is_variant=True,
    ),
    Case(
        "Ctrl-C twice",
        injected=in_step("sleep", 2, 5),
        act=signalled(signal.SIGINT, again=signal.SIGINT, group=True),
        code=130,
        report=r"error: stopped .*\[E_STOPPED\]",
        is_variant=True,
    ),
    Case("SIGUSR1 to the launcher", prepare=paced("0.1"), act=signalled(signal.SIGUSR1), code=130, is_variant=True),
    Case(
        "SIGTERM, with a step longer than --grace",
        in_step("sleep", 2, 5),
        ("--grace", "1s"),
        act=signalled(signal.SIGTERM),
        code=130,
        report="error: stopped before the end of a step within the grace time of 1 s",
        is_variant=True,
    ),
    Case(
        "rank 0 is stopped (SIGSTOP)",
        in_step("stop", 0),
        HANG,
        code=1,
        report="error: rank 0 hangs: no progress ",
        is_variant=True,
    ),
    Case(
        "rank 2 is stopped, restarts allowed",
        in_step("stop"),
        (*HANG, *RESTART),
        output=("restart 1 of 2",),
        is_variant=True,
    ),
    Case("rank 2 is stopped for 1.5 s", in_step("pause"), ("--hang-after", "8s"), is_variant=True),
    Case(
        "rank 2 hangs in a step",
        in_step("sleep"),
        HANG,
        code=1,
        report="error: rank 2 hangs: no progress for ",
        output=("rank 2: in step 7", "ranks 0, 1 and 3: in step 7, waiting in ", "faulty.py:"),
    ),
    Case(
        "a rank hangs in its dataset",
        {"kind": "hang in dataset", "rank": "any"},
        (*HANG, "--workers", 0),
        code=1,
        report=r"error: rank \d hangs: no progress for ",
        output=("__getitem__",),
        is_variant=True,
    ),
    Case(
        "rank 1 raises, restarts allowed",
        in_step("raise", 1),
        RESTART,
        output=("restart 1 of 2, on 4 processes",),
        is_variant=True,
    ),
    Case(
        "rank 3 raises in evaluation",
        {"kind": "raise in evaluation", "rank": 3},
        code=1,
        report=r"error: rank 3 failed after samestep\.init\(\): ArithmeticError",
        is_variant=True,
    ),
    Case(
        "SIGTERM in evaluation",
        {"kind": "wait in evaluation", "rank": 1},
        act=stop_in_evaluation,
        code=130,
        is_variant=True,
    ),
    *(
        Case(
            f"rank 1 calls {call}({code})",
            in_step(f"{call}({code})", 1),
            code=1,
            report=f"error: rank 1 ended with exit code {code} ",
            is_variant=True,
        )
        for call, code in (("sys.exit", 0), ("os._exit", 5))
    ),
    Case(
        "rank 2: segmentation fault",
        in_step("segmentation fault"),
        code=1,
        report="error: rank 2 was killed by SIGSEGV in step 7",
        output=("string_at",),
        is_variant=True,
    ),
    Case(
        "rank 2 exceeds a memory limit",
        in_step("memory limit"),
        code=1,
        report="error: rank 2 failed in step 7: RuntimeError: .*memory",
        output=("use less memory per rank",),
        is_variant=True,
    ),
    Case(
        "the loss of rank 1 is NaN",
        in_step("nan", 1),
        code=1,
        report="error: rank 0 reached numbers of the optimizer while rank 1 reached "
        r"a loss or gradient of step 7 that is not finite \[E_RANK_DESYNC\]$",
        is_variant=True,
    ),
    Case(
        "a loader worker is killed",
        {"kind": "kill a worker", "rank": "any"},
        ("--workers", 1),
        code=1,
        # The signal handler or the queue detects the kill first.
        report=r"error: rank \d failed .*worker .*(killed|exited unexpectedly)",
    ),
    Case(
        "rank 0 is killed during a save, in rename",
        in_step("kill at rename", 0, 5),
        RESTART,
        output=("restart 1 of 2, on 4 processes: rank 0 was killed by SIGKILL",),
        is_variant=True,
    ),
    Case(
        "a checkpoint file exceeds the file size limit",
        in_step("file size limit", 0),
        code=1,
        report=r"error: the checkpoint of step \d+ cannot be written .*File too large",
        is_variant=True,
    ),
    Case(
        "the disk is full",
        in_step("disk full", 0, 5),
        code=1,
        report=r"error: the checkpoint of step \d+ cannot be written .*No space left on device",
        is_variant=True,
    ),
    Case(
        "the checkpoint folder is lost",
        in_step("folder lost", 0),
        code=1,
        report="error: .*",
        resume_on=0,
        is_variant=True,
    ),
    *(
        Case(
            f"{fault}, then a rank is killed",
            options=RESTART,
            act=damage_and_kill(damage),
            prepare=paced("0.6"),  # leaves time to damage the checkpoint
            output=("restart 1 of 2, on 4 processes: rank 1 was killed by SIGKILL in step 10",),
            is_variant=damage is truncate,
        )
        for fault, damage in (
            ("a bit of the newest checkpoint flips", flip),
            ("the newest checkpoint is truncated", truncate),
        )
    ),
    Case("a second run in the same directory", act=start_second_run, prepare=paced("1.5"), is_variant=True),
    Case(
        "rank 2 leaves the loop",
        command=loop("fewer batches", 2, 6, *HANG),
        code=1,
        report=r"error: rank 0 (is at an operation .*, rank 2 at the end|reached .* while rank 2 ).*\[E_RANK_DESYNC\]",
        is_variant=True,
    ),
    Case(
        "rank 2 leaves the loop, restarts allowed",
        command=loop("fewer batches", 2, 6, *HANG, *RESTART),
        output=("restart 1 of 2, on 4 processes: rank 0 ", "rank 2 "),
        is_variant=True,
    ),
    Case(
        "with torchrun's variables, the port is in use",
        prepare=occupy_port,
        variables=as_torchrun(PORT)(0, 2),
        code=2,
        report=f"error: port {PORT} at 127.0.0.1 is used",
    ),
    Case("leftover files of killed runs", command=loop("", 0, 0), prepare=create_leftovers, is_variant=True),
]
