"""Plain loops with `samestep.parallel` in whole programs: kills, resumptions, launchers, output and failures."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from helpers.started import as_torchrun, free_port, python, ranks
from helpers.system import Done, Running
from helpers.system import samestep as samestep_command
from own_loops import divided_loop
from samestep.launcher.failure import RankError

EPOCHS, STEPS = 3, 15
FOLDER = Path(__file__).parent
LOOP, FAILING, DAMAGED = (FOLDER / f"{name}_loop.py" for name in ("divided", "failing", "damaged"))
DIVIDED = "Sequential: calls divided between {} processes\n"
SHORT = "Sequential: some calls computed whole on every process: fewer rows than ranks\n"
LEFT = "error: rank 0 reached {} while rank 1 reached nothing further, at "


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run on one process."""
    folder = tmp_path_factory.mktemp("plain")
    seen = samestep.launch(divided_loop.train, folder, EPOCHS, processes=1)
    require_seen(seen, 1, STEPS)
    return folder


def require_seen(seen: dict[str, Any], processes: int, steps: int) -> None:
    """Require the results of a script of some steps on each number of processes."""
    assert seen["steps"] == steps
    assert (seen["variables"], seen["own branch"]) == ([], False)
    samples, right, accuracy = seen["evaluation"][0]
    assert seen["evaluation"] == [[samples, right, accuracy]] * processes
    assert samples == divided_loop.SAMPLES
    assert accuracy == pytest.approx(right / samples)


def require_equal_weights(folder: Path, other: Path) -> None:
    """Require weights and statistics that are equal to rounding."""
    states = [torch.load(path / "weights.pt") for path in (folder, other)]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_killed_run_resumes_on_other_numbers_of_processes(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 was killed by SIGKILL after samestep\.init"):
        samestep.launch(divided_loop.train, tmp_path, EPOCHS, 7, processes=2)
    with pytest.raises(RankError, match="SIGKILL"):
        samestep.launch(divided_loop.train, tmp_path, EPOCHS, 4, processes=3)
    seen = samestep.launch(divided_loop.train, tmp_path, EPOCHS, processes=1)
    require_seen(seen, 1, STEPS - 7 - 4)
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.long), 3])
def test_launched_function_has_the_weights_of_one_process(plain: Path, tmp_path: Path, processes: int) -> None:
    seen = samestep.launch(divided_loop.train, tmp_path, EPOCHS, processes=processes)
    require_seen(seen, processes, STEPS)
    require_equal_weights(tmp_path, plain)


def run(processes: int, *arguments: object, cwd: Path) -> Done:
    """Run a script by `samestep run`; leave out its first line, which names the mode."""
    done = samestep_command("run", "--processes", processes, *arguments, cwd=cwd)
    if processes == 1:
        return done
    first, _, rest = done.err.partition("\n")
    assert first.endswith(f" on {processes} processes: it imports samestep")
    return replace(done, err=rest)


@pytest.mark.slow
def test_script_says_once_how_its_calls_are_computed(plain: Path, tmp_path: Path) -> None:
    first = run(2, LOOP, tmp_path, EPOCHS, 0, cwd=tmp_path)
    assert (first.code, first.err) == (0, DIVIDED.format(2))
    require_seen(json.loads(first.out), 2, STEPS)
    require_equal_weights(tmp_path, plain)
    again = run(3, LOOP, tmp_path, EPOCHS, 0, cwd=tmp_path)
    assert again.code == 0
    complete = f"this run is complete: {EPOCHS} of {EPOCHS} epochs were trained by earlier starts\n"
    assert again.err == complete + DIVIDED.format(3) + SHORT  # of the evaluation: its last batch has two samples
    require_seen(json.loads(again.out), 3, 0)


@pytest.mark.slow
def test_nothing_is_printed_on_one_process(tmp_path: Path) -> None:
    command = [*python(str(LOOP)), tmp_path, str(EPOCHS), "0"]
    environment = {"PYTHONPATH": f"{FOLDER.parents[1] / 'src'}:{FOLDER.parent}"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    require_seen(json.loads(done.stdout), 1, STEPS)
    done_again = run(1, LOOP, tmp_path / "other", EPOCHS, 0, cwd=tmp_path)
    assert (done_again.code, done_again.err) == (0, "")


def started(script: Path, *arguments: object, cwd: Path, size: int = 2) -> Sequence[Done]:
    """Run a script by plain Python with the variables of torchrun."""
    with ranks(as_torchrun(free_port()), size, script, *arguments, cwd=cwd, command=[sys.executable]) as processes:
        return processes.wait()


@pytest.mark.slow
def test_loop_under_torchrun(plain: Path, tmp_path: Path) -> None:
    main, other = started(LOOP, tmp_path, EPOCHS, 0, cwd=tmp_path)
    assert (main.code, main.err) == (0, DIVIDED.format(2))
    assert other == Done(0, "", "")
    require_seen(json.loads(main.out), 2, STEPS)
    require_equal_weights(tmp_path, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "title"),
    [
        ("raise", "error: rank 1 failed after samestep.init(): OSError: the switch was off [E_RANK_FAILED]"),
        ("leave", LEFT.format("a call of a module")),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("kill", "error: rank 1 was killed by SIGKILL after samestep.init() [E_RANK_KILLED]"),
                ("exit", LEFT.format("a call of a module")),
                ("leave before backward", LEFT.format("the gradient of the loss")),
            )
        ),
    ],
)
def test_failure_is_reported_once(tmp_path: Path, what: str, title: str) -> None:
    done = run(2, FAILING, what, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(DIVIDED.format(2) + title)
    assert done.err.count("error: ") == 1
    assert ("Traceback" in done.err) == (what == "raise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "rank"),
    [(2, 1), *(pytest.param(workers, rank, marks=pytest.mark.long) for workers, rank in ((0, 1), (0, -1), (2, -1)))],
)
def test_damaged_sample_is_reported_once_with_its_index(tmp_path: Path, workers: int, rank: int) -> None:
    done = run(2, DAMAGED, workers, rank, cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("error: ") == 1
    assert "failed after samestep.init(): OSError: the file is damaged [E_RANK_FAILED]\n" in done.err
    assert done.err.rstrip().endswith("    while loading sample 23 of the dataset")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "title"),
    [
        ("raise", "Traceback (most recent call last):\n"),
        pytest.param("leave", LEFT.format("a call of a module"), marks=pytest.mark.long),
        ("exit", LEFT.format("a call of a module")),
    ],
)
def test_failure_is_reported_once_under_torchrun(tmp_path: Path, what: str, title: str) -> None:
    done = started(FAILING, what, cwd=tmp_path)
    assert [one.code for one in done] == [1, 1]
    err = "".join(one.err for one in done).replace(DIVIDED.format(2), "")
    assert err.startswith(title)
    assert "atexit" not in err
    assert err.count("Traceback") == (what == "raise")
    assert ("OSError: the switch was off" in done[1].err) == (what == "raise")


@pytest.mark.slow
def test_killed_rank_under_torchrun_ends_the_others(tmp_path: Path) -> None:
    main, other = started(FAILING, "kill", cwd=tmp_path)
    assert (main.code, other.code) == (1, -signal.SIGKILL)
    assert "[E_PEER_LOST]" in main.err.splitlines()[1]


@pytest.mark.slow
def test_interrupt_ends_the_loop(tmp_path: Path) -> None:
    with Running("run", "--processes", 2, FAILING, "wait", cwd=tmp_path) as running:
        running.until((tmp_path / "waiting").exists, "both ranks")
        running.kill_group(signal.SIGINT)
        done = running.wait(60)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert "error: stopped before the end of a step [E_STOPPED]" in done.err
