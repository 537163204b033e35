"""`samestep run` on scripts with one obstacle each: the text of plain Python, or one error that names the line."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.system import COMMAND, Done, Running, environment, samestep

FOLDER = Path(__file__).parents[1] / "scripts" / "planted"
BASES = ("mlp", "cnn", "lstm")
OBSTACLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "bases")
# Exit code and error code; the error names a line of the script that has the comment "# named".
ERRORS = {
    "own_group": (2, "E_OWN_GROUP"),
    "seed_from_pid": (1, "E_RANK_SETTINGS"),
    "seed_from_time": (1, "E_RANK_SETTINGS"),
    "time_limit": (1, "E_RANK_DESYNC"),
    "torch_generator_seed": (1, "E_RANK_BATCH"),
}
# These end with an error only if ranks happen to differ.
BY_CHANCE = ("time_limit",)
INPUT = "2\n0.05\n0.02\n"


def run_on_three(script: Path, base: str, folder: Path) -> Done:
    """Run the script on 3 processes by the command, with standard input if the script reads it."""
    folder.mkdir()
    if script.stem != "console_input":
        return samestep("run", "--processes", 3, "--runs", "../runs", script, base, cwd=folder)
    (folder.parent / "input.txt").write_text(INPUT)
    shell = ("sh", "-c", 'exec "$@" < ../input.txt', "sh", *COMMAND)
    with Running("run", "--processes", 3, "--runs", "../runs", script, base, cwd=folder, command=shell) as running:
        return running.wait(120)


def run_plainly(script: Path, arguments: list[str], folder: Path) -> Done:
    """Run the script by plain Python."""
    folder.mkdir()
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment(), input=INPUT, capture_output=True, text=True, timeout=120, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def files(folder: Path) -> int:
    """Return the number of files, whose names may contain the time."""
    return sum(path.is_file() for path in folder.rglob("*"))


def named_lines(script: Path) -> list[str]:
    """Return file and line of each line that an error may name."""
    return [
        f"{path.name}:{number}"
        for path in (script, FOLDER / "bases.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.endswith("# named")
    ]


def require_error(done: Done, script: Path) -> None:
    """Require one error, with its code and a line of the script."""
    code, error = ERRORS[script.stem]
    assert (done.code, re.findall(r"^error: .*\[(E_\w+)\]$", done.err, re.MULTILINE)) == (code, [error]), done.err
    assert any(re.search(rf"{line}\b", done.err) for line in named_lines(script)), done.err
    assert "Traceback" not in done.err


# One of each kind; the others, and the other scripts, have their turn in the long tests.
FREQUENT = {"console_input", "own_group", "unseeded_numpy"}


def cases() -> Iterator[Any]:
    """Yield each obstacle in each script."""
    for obstacle, base in itertools.product(OBSTACLES, BASES):
        is_frequent = obstacle in FREQUENT and base == BASES[0]
        yield pytest.param(obstacle, base, marks=pytest.mark.slow if is_frequent else pytest.mark.long)


@pytest.mark.parametrize(("obstacle", "base"), list(cases()))
def test_obstacle_changes_nothing_or_is_named(obstacle: str, base: str, tmp_path: Path) -> None:
    script = FOLDER / f"{obstacle}.py"
    done = run_on_three(script, base, tmp_path / "three")
    if obstacle in ERRORS and not (obstacle in BY_CHANCE and done.code == 0):
        require_error(done, script)
        return
    # What the script has drawn from the clock or the operating system is given to plain Python.
    drawn = re.findall(r"^drawn (.*)$", done.out, re.MULTILINE)
    plain = run_plainly(script, [base, *drawn], tmp_path / "plain")
    assert (done.code, done.out) == (plain.code, plain.out), done.err
    assert files(tmp_path / "three") == files(tmp_path / "plain")
    if plain.code == 1:  # an exception of the script
        assert plain.err.splitlines()[-1] in done.err
        assert re.search(rf'{script.name}", line \d+, in <module>\n.*# named', done.err), done.err
