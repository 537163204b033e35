"""Plain scripts with one added line on 1 to 4 processes: a fixed eighth of them. `make plain-loop` runs all."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from plain_loop.judge import deviation
from plain_loop.script import PROCESSES, SCRIPTS, find_scripts, read_script, script_names

ROOT = Path(__file__).parents[2]
PARTS = 8
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"}


def is_quick(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % PARTS == 0


QUICK = [name for name in script_names() if is_quick(name)]


def run(names: list[str], folder: Path, processes: str) -> list[dict[str, object]]:
    """Run scripts in a process tree of their own, which imports torch once; return the verdicts."""
    output = folder / "verdicts.json"
    command = [sys.executable, "-m", "plain_loop.runner", *names, "--processes", processes, "--json", str(output)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )
    assert output.exists(), done.stdout + done.stderr
    verdicts: list[dict[str, object]] = json.loads(output.read_text(encoding="utf-8"))
    return verdicts


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = {}
    for verdict in run(QUICK, tmp_path_factory.mktemp("quick"), ",".join(str(number) for number in PROCESSES)):
        found.setdefault(str(verdict["script"]), []).append(verdict)
    return found


@pytest.mark.skipif(find_spec("samestep.global_view") is None, reason="samestep.parallel does not exist yet")
@pytest.mark.parametrize("name", QUICK)
def test_script_computes_what_plain_python_computes(name: str, verdicts: dict[str, list[dict[str, object]]]) -> None:
    wrong = [f"on {verdict['processes']}: {verdict['problem']}" for verdict in verdicts[name] if verdict["problem"]]
    assert not wrong, "\n".join(wrong)


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
