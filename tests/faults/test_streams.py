"""A closed, full or stopped output costs no work; files of the current folder replace no module of Python."""

import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.pipelines import CODE, exit_code, pipeline
from helpers.surroundings import RecordFault, nothing_left_behind, require_bounded, require_single_report, wait_for_end
from helpers.system import Running, events, here, samestep, state_of, steps_saved, until, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
RUN = Path("runs/a")
CONSOLE_SCRIPT = (str(Path(sys.executable).parent / "samestep"),)
# `python -m` imports these modules itself, before Samestep can change the import path.
IMPORTED_BY_RUNPY = {
    "collections",
    "contextlib",
    "functools",
    "importlib",
    "keyword",
    "operator",
    "reprlib",
    "types",
    "warnings",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("reference")
    assert here("train", RECIPE, "--name", "a", cwd=path) == 0
    return weights(path / RUN)


def train(path: Path, streams: str = "2>&1 | tee log", processes: int = 2, **options: object) -> Running:
    arguments = ("train", RECIPE, "--name", "a", "--processes", processes)
    return pipeline(*arguments, cwd=path, streams=streams, **options)  # type: ignore[arg-type]


def hold_in_step_7(running: Running, path: Path) -> None:
    """Wait until rank 0 is in step 7, in which the file `hold` keeps it."""
    running.until(lambda: len(events(path / RUN, "step")) == 6, "step 7")


def require_resumable(path: Path, reference: tuple[str, str]) -> None:
    """Require that no completed step is lost, and resume on another number of processes to the same weights."""
    steps = [event["step"] for event in events(path / RUN, "step")]
    assert steps_saved(path / RUN)[-1] == state_of(path / RUN)["step"] == steps[-1]
    assert here("resume", RUN, "--processes", 1, cwd=path) == 0
    assert weights(path / RUN) == reference


SIGNALS = {
    "Ctrl-C": signal.SIGINT,
    "SIGTERM to the group": signal.SIGTERM,
    "SIGHUP to the group": signal.SIGHUP,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "Ctrl-C" else pytest.mark.long) for name in SIGNALS]
)
def test_signal_that_ends_tee_too_stops_with_a_checkpoint(
    name: str, tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault
) -> None:
    (tmp_path / "hold").write_text("0 7", encoding="utf-8")
    with train(tmp_path) as running, nothing_left_behind(running, tmp_path):
        hold_in_step_7(running, tmp_path)
        fault = time.monotonic()
        running.kill_group(SIGNALS[name])
        until(lambda: "tee" not in commands(running), "tee has ended", 10)
        (tmp_path / "hold").unlink()
        wait_for_end(running, fault)
    assert exit_code(tmp_path) == 130
    require_bounded((tmp_path / "log").read_text(encoding="utf-8"))
    require_resumable(tmp_path, reference)
    record_fault(f"{name} under `2>&1 | tee log`", "exit code 130; resumed on 1: the same weights")


@pytest.mark.long
def test_closed_terminal_of_a_pipeline_stops_with_a_checkpoint(
    tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault
) -> None:
    """The shell is the session leader of a terminal that is closed: the kernel sends SIGHUP."""
    (tmp_path / "hold").write_text("0 7", encoding="utf-8")
    master, slave = os.openpty()
    lead = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    words = f"{{ trap : HUP; {' '.join(CONSOLE_SCRIPT)} train {RECIPE} --name a; echo $? > {CODE}; }} 2>&1 | tee log"
    command = (sys.executable, "-c", lead, "bash", "-c", words)
    with Running(cwd=tmp_path, command=command, terminal=slave) as running, nothing_left_behind(running, tmp_path):
        os.close(slave)
        hold_in_step_7(running, tmp_path)
        fault = time.monotonic()
        os.close(master)
        time.sleep(0.2)
        (tmp_path / "hold").unlink()
        wait_for_end(running, fault)
        until((tmp_path / CODE).exists, "the exit code", 10)
    assert exit_code(tmp_path) == 130
    require_resumable(tmp_path, reference)
    record_fault("the terminal of a pipeline is closed", "exit code 130; resumed on 1: the same weights")


def commands(running: Running) -> list[str]:
    """Return the names of the programs of a pipeline."""
    names = []
    for process in running.processes():
        path = Path(f"/proc/{process}/comm")
        names.append(path.read_text(encoding="utf-8").strip() if path.exists() else "")
    return names


STREAMS = {
    "standard input, output and error are closed": ("0<&- >&- 2>&-", pytest.mark.slow),
    "standard output and error on a full device": (">/dev/full 2>&1", pytest.mark.long),
    "the reader of a pipe ends: `2>&1 | head -1`": ("2>&1 | head -1 > log", pytest.mark.long),
    "standard error is closed": ("2>&-", pytest.mark.long),
    "standard input is closed": ("0<&-", pytest.mark.long),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, (_, mark) in STREAMS.items()])
def test_lost_output_costs_no_work(
    name: str, tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault
) -> None:
    with train(tmp_path, STREAMS[name][0]) as running, nothing_left_behind(running, tmp_path):
        running.wait(90)
    assert exit_code(tmp_path) == 0
    assert weights(tmp_path / RUN) == reference
    # A file with the number of a closed descriptor would receive the output of other code.
    lines = (tmp_path / RUN / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(events(tmp_path / RUN)) == len(lines)
    record_fault(name, "exit code 0; the same weights")


@pytest.mark.long
def test_locale_without_unicode(tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault) -> None:
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with train(tmp_path, "2>&1 | tee log", variables=locale) as running, nothing_left_behind(running, tmp_path):
        running.wait(90)
    assert exit_code(tmp_path) == 0
    assert weights(tmp_path / RUN) == reference
    record_fault("LANG=C, without Python's UTF-8 mode", "exit code 0; the same weights")


def test_result_that_cannot_be_written_is_a_failure(tmp_path: Path, record_fault: RecordFault) -> None:
    with pipeline("doctor", "--quick", "--json", cwd=tmp_path, streams=">/dev/full") as running:
        done = running.wait(60)
    assert exit_code(tmp_path) == 1
    title = require_single_report(done, 0)  # of the shell
    assert title.endswith("[E_OUTPUT]")
    record_fault("the result of a command on a full device", f"exit code 1; `{title}`")


@pytest.mark.long
def test_reader_that_stops_does_not_stop_training(
    tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault
) -> None:
    """As Ctrl-S on a terminal, or a pager: the pipe is full from the start."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    with train(tmp_path, "> summary", terminal=write) as running, nothing_left_behind(running, tmp_path):
        running.wait(90)
    os.close(read)
    os.close(write)
    assert exit_code(tmp_path) == 0
    assert weights(tmp_path / RUN) == reference
    assert "samestep eval" in (tmp_path / "summary").read_text(encoding="utf-8")
    record_fault("the reader of standard error stops reading", "exit code 0; the same weights")


def shadow(folder: Path, kept: set[str]) -> None:
    """Write files with the names of installed modules; importing one of them ends the process."""
    packages = {"numpy", "pydantic", "psutil", "rich", "tensorboard", "torch", "torchmetrics", "torchvision", "yaml"}
    for name in (set(sys.stdlib_module_names) | packages) - kept - {"__main__"}:
        if find_spec(name) is not None:  # other names, of modules for Windows, are left to the user
            (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder')", encoding="utf-8")


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        pytest.param(CONSOLE_SCRIPT, set(), marks=pytest.mark.slow, id="samestep"),
        pytest.param((sys.executable, "-m", "samestep"), IMPORTED_BY_RUNPY, marks=pytest.mark.long, id="python -m"),
    ],
)
def test_files_named_like_modules(
    command: tuple[str, ...], kept: set[str], tmp_path: Path, reference: tuple[str, str], record_fault: RecordFault
) -> None:
    shadow(tmp_path, kept)
    source = (RECIPE.parent / "recorded.py").read_text(encoding="utf-8")
    (tmp_path / "my_project.py").write_text(source, encoding="utf-8")
    recipe = RECIPE.read_text(encoding="utf-8").replace("helpers.recorded:", "my_project:")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    arguments = ("train", "recipe.yaml", "--name", "a", "--processes", 2, "--workers", 1)
    with pipeline(*arguments, cwd=tmp_path, streams="", command=command) as running:
        done = running.wait(90)
    assert exit_code(tmp_path) == 0, done.err
    assert weights(tmp_path / RUN) == reference
    name = "python -m samestep" if kept else "samestep"
    observed = "exit code 0, with a model of the current folder; the same weights"
    record_fault(f"files named like modules in the current folder, `{name}`", observed)


def test_command_that_is_not_a_pipeline_has_the_same_code(tmp_path: Path) -> None:
    """The helper of these tests returns the code of the command, not of the shell."""
    with pipeline("--no-such-option", cwd=tmp_path) as running:
        running.wait(30)
    assert exit_code(tmp_path) == samestep("--no-such-option", cwd=tmp_path).code == 2
