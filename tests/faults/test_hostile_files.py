"""Files of others: each is refused within 2 s and 500 MB, or shown without its invalid lines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import hostile
from helpers.surroundings import RecordFault, require_bounded
from helpers.system import TESTS, environment, here
from samestep.recipes.recipe_files import load_recipe, write_recipe

SECONDS = 2.0


@pytest.mark.slow
def test_hostile_data_files_are_refused(tmp_path: Path, record_fault: RecordFault) -> None:
    """One process with a limit of its memory reads all files."""
    program = tmp_path / "gs"  # Pillow starts the program of this name for EPS
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n", encoding="utf-8")
    program.chmod(0o755)
    variables = environment()
    done = subprocess.run(
        [sys.executable, "-m", "helpers.hostile", tmp_path],
        cwd=TESTS,
        env={**variables, "PATH": f"{tmp_path}:{variables['PATH']}"},
        text=True,
        capture_output=True,
        check=False,
        timeout=220,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert list(results) == list(hostile.FILES)
    for name, (code, seconds, text) in results.items():
        assert code == "E_UNREADABLE", (name, text)
        assert seconds < SECONDS, name
        require_bounded(text)
        record_fault(name, f"`{code}`")
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Directory of a run without a checkpoint."""
    folder = tmp_path / "runs/a"
    (folder / "ranks").mkdir(parents=True)
    write_recipe(load_recipe("digits"), folder / "recipe.yaml")
    return folder


def test_top_and_report_skip_hostile_lines(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], record_fault: RecordFault
) -> None:
    (run / "events.jsonl").write_bytes(b"".join(line + b"\n" for line in hostile.EVENTS))
    (run / "ranks/rank-0.jsonl").write_bytes(b"".join(line + b"\n" for line in hostile.RANK_LINES))
    (run / f"ranks/rank-{10**30}.jsonl").touch()
    (run / "environment.json").write_bytes(hostile.ENVIRONMENT)
    for options in ((), ("--json",)):
        assert here("top", run, "--once", *options, cwd=tmp_path) == 0
        out, err = capfd.readouterr()
        assert hostile.controls(out + err) == set(), out
        assert len(out) < 20_000
        if options == ("--json",):
            status = json.loads(out)
            assert status["step"] == hostile.LAST_STEP
            assert [row["rank"] for row in status["ranks"]] == [0]
    assert here("report", run, "--out", tmp_path / "report.html", "--json", cwd=tmp_path) == 0
    out, err = capfd.readouterr()
    summary = json.loads(out)
    assert summary["runs"][0]["steps"] == hostile.LAST_STEP
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert hostile.controls(page) == set()
    assert "<script>alert" not in page
    record_fault(
        "events and lines of ranks with wrong types, huge values and terminal escapes",
        "exit code 0; no control characters",
    )


@pytest.mark.parametrize("name", ["deep recipe", "recipe of another type", "recipe that is not UTF-8"])
def test_hostile_recipes_of_a_run_end_top_and_report(
    name: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "recipe.yaml").write_bytes(hostile.RECIPES[name])
    for command in (("top", run, "--once"), ("report", run)):
        assert here(*command, cwd=tmp_path) == 2
        _, err = capfd.readouterr()
        require_bounded(err)
