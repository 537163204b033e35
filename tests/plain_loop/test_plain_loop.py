"""A fixed eighth of the plain scripts, each on one number of processes. `make plain-loop` runs all on 1 to 4."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plain_loop.judge import deviation
from plain_loop.script import SCRIPTS, Script, find_scripts, read_script

ROOT = Path(__file__).parents[2]
PARTS = 8
PROCESS_CHOICES = (1, 2, 2, 2, 3, 3, 3, 4)
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"}


def quick_processes(script: Script) -> int | None:
    """Return the number of processes on which a script belongs to the quick part, or None."""
    digest = hashlib.sha256(script.name.encode()).digest()
    if digest[0] % PARTS or script.needs:  # libraries that take long to import
        return None
    numbers = [number for number in PROCESS_CHOICES if number in script.processes]
    return numbers[digest[1] % len(numbers)]


QUICK = {script.name: quick_processes(script) for script in find_scripts([]) if quick_processes(script) is not None}


DIVIDED_OUTPUTS = ("view_large_outputs", "train_checkpoint_around_the_model", "view_batch_dict_written")


def run(names: list[str], folder: Path, *options: str) -> list[dict[str, object]]:
    """Run scripts in a process tree of their own, which imports torch once; return the verdicts."""
    output = folder / "verdicts.json"
    command = [sys.executable, "-m", "plain_loop.runner", *names, *options, "--json", str(output)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )
    assert output.exists(), done.stdout + done.stderr
    verdicts: list[dict[str, object]] = json.loads(output.read_text(encoding="utf-8"))
    return verdicts


@pytest.mark.slow
def test_scripts_compute_what_plain_python_computes(tmp_path: Path) -> None:
    found = run([f"{name}:{processes}" for name, processes in QUICK.items()], tmp_path)
    assert {verdict["script"]: verdict["processes"] for verdict in found} == QUICK
    assert [verdict["problem"] for verdict in found] == [""] * len(QUICK)


@pytest.mark.slow
def test_scripts_compute_the_same_if_outputs_stay_divided(tmp_path: Path) -> None:
    found = run([f"{name}:2" for name in DIVIDED_OUTPUTS], tmp_path, "--rows")
    assert [verdict["problem"] for verdict in found] == [""] * len(DIVIDED_OUTPUTS)


def test_every_script_has_an_expectation_and_the_line() -> None:
    for script in find_scripts([]):
        assert script.expected != "error" or script.words.startswith("E_"), script.name
        assert "import samestep" not in script.source, script.name
        compile(script.source_with_line, str(script.path), "exec")


def test_added_line_keeps_the_numbers_of_lines() -> None:
    script = read_script(SCRIPTS / "parity_model_batch_mean.py")
    plain, changed = script.source.splitlines(), script.source_with_line.splitlines()
    different = [row for row, (line, other) in enumerate(zip(plain, changed, strict=True)) if line != other]
    assert [changed[row] for row in different] == ["import samestep", "model = samestep.parallel(model)"]


@pytest.mark.long
def test_forked_run_prints_what_plain_python_prints(tmp_path: Path) -> None:
    """Modules that were imported before the fork change nothing."""
    command = [sys.executable, "-m", "plain_loop.runner", "parity_model_batch_mean", "--processes", "0"]
    environment = os.environ | ENVIRONMENT
    kept = tmp_path / "kept"
    subprocess.run([*command, "--keep", str(kept)], env=environment, capture_output=True, timeout=100, check=True)
    script = SCRIPTS / "parity_model_batch_mean.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    forked = (kept / "parity_model_batch_mean.0" / "out0").read_text(encoding="utf-8")
    assert forked == done.stdout
    assert forked.startswith("R ")


@pytest.mark.parametrize(
    ("expected", "printed", "result"),
    [
        (["R 1 2"], ["R 1 2"], 0.0),
        (["R 0 4"], ["R 1 4"], 0.25),
        (["R nan inf"], ["R nan inf"], 0.0),
        (["R nan 1"], ["R 1 1"], float("inf")),
        (["R 1 1"], ["R nan 1"], float("inf")),
        (["R 1", "D 12"], ["R 1", "D 34"], 0.0),
        (["R 1"], [], "0 lines of numbers instead of 1"),
        (["R 1"], ["R 1 2"], "2 numbers instead of 1 in line 0"),
        ([], [], "the plain loop printed no numbers"),
    ],
)
def test_deviation_is_relative_to_the_largest_number(
    expected: list[str], printed: list[str], result: float | str
) -> None:
    assert deviation(expected, printed) == result
