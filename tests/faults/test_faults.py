"""Every fault case ends with equal weights, or with one report and a run that can be resumed.

`make faults` writes the results to docs/reference/faults.md.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.fault_cases import CASES, LOOP, RECIPE, RUN, SAVING, Case
from helpers.fault_page import PAGE, Row, read_rows, write_page
from helpers.shared_memory import abandoned, require_none_left
from helpers.system import Done, Running, here, samestep, steps_saved, until, weights

REPORT_SECONDS = 10
_rows: dict[str, Row] = {}


@dataclass(frozen=True)
class Reference:
    """Weights of runs without a fault."""

    recipe: tuple[str, str]
    loop: tuple[str, str]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = tmp_path_factory.mktemp("reference")
    assert here("train", RECIPE, "--name", "a", cwd=path) == 0
    assert samestep("run", "--processes", 2, LOOP, "", 0, 0, cwd=path).code == 0
    return Reference(weights(path / RUN), loop_weights(path))


@pytest.fixture(scope="module", autouse=True)
def page(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--faults-page"):
        assert len(_rows) == len(CASES), "the page is written from all cases"
        write_page([_rows[case.fault] for case in CASES])


def loop_weights(path: Path) -> tuple[str, str]:
    shutil.rmtree(path / "as-run", ignore_errors=True)
    shutil.copytree(path / "loop", path / "as-run/checkpoints", symlinks=True)
    return weights(path / "as-run")


def wait_for_end(running: Running, path: Path) -> tuple[Done, float]:
    """Return the result of the command, and the seconds between the fault and the end."""
    done = running.wait(90)
    fired = path / "fired.json"
    return done, time.time() - fired.stat().st_mtime if fired.exists() else 0.0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.fault, marks=pytest.mark.long if case.is_variant else pytest.mark.slow)
        for case in CASES
    ],
)
def test_fault(case: Case, reference: Reference, tmp_path: Path) -> None:
    before = abandoned()
    is_loop = case.command[0] == "run"
    if case.injected is not None:
        (tmp_path / "fault.json").write_text(json.dumps(case.injected), encoding="utf-8")
    (tmp_path / "fault").touch()
    if case.prepare is not None:
        case.prepare(tmp_path)
    has_processes = is_loop or "--processes" in case.options or case.variables
    machine = () if has_processes else ("--processes", 4)
    saving = () if is_loop else SAVING
    command = (*case.command, *saving, *machine, *case.options)
    with Running(*command, cwd=tmp_path, variables=case.variables) as running:
        if case.act is not None:
            case.act(running, tmp_path)
        done, seconds = wait_for_end(running, tmp_path)
        until(lambda: not running.processes(), "no process is left", 30)
    assert done.code == case.code, done.err
    if case.code:
        assert seconds < REPORT_SECONDS, done.err
    report = report_title(done, case)
    for text in case.output:
        assert text in done.err
    require_none_left(before)
    resumed = "" if case.code == 0 else resume(case, tmp_path)
    if is_loop:
        assert loop_weights(tmp_path) == reference.loop
    else:
        assert weights(tmp_path / RUN) == reference.recipe
    _rows[case.fault] = Row(case.fault, observed(case, report, done, resumed))


def report_title(done: Done, case: Case) -> str:
    """Return the first line of the report, which must be the only one."""
    titles = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(titles) == (1 if case.report else 0), done.err
    if not case.report:
        return ""
    assert re.match(case.report, titles[0]), done.err
    return titles[0].removeprefix("error: ")


def resume(case: Case, path: Path) -> str:
    """Resume the ended run; return a description for the table."""
    if case.command[0] == "run":
        assert samestep("run", "--processes", case.resume_on, LOOP, "", 0, 0, cwd=path).code == 0
        return f"the same command on {case.resume_on}"
    if case.resume_on == 0:  # restore the lost folder
        (path / RUN / "checkpoints").unlink()
        (path / RUN / "elsewhere").rename(path / RUN / "checkpoints")
    number = case.resume_on or 1
    if not (path / RUN).exists() or not steps_saved(path / RUN):
        shutil.rmtree(path / RUN, ignore_errors=True)
        assert here("train", RECIPE, "--name", "a", "--processes", number, cwd=path) == 0
        return f"started again on {number}"
    assert here("resume", RUN, "--processes", number, cwd=path) == 0
    return f"resumed on {number}"


def observed(case: Case, report: str, done: Done, resumed: str) -> str:
    """Return the result for the table: exit code, error code, restarts, and the number of ranks of the resumed run."""
    parts = [f"exit code {case.code}" if case.code >= 0 else "killed"]
    if code := re.search(r"\[(E_\w+)\]", report):
        parts.append(code[1])
    parts += ["one restart" for line in done.err.splitlines() if line.startswith("restart ")]
    return "; ".join(filter(None, [*parts, resumed]))


def test_page_has_every_fault(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--faults-page"):
        pytest.skip("the page is written after all cases")
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    assert [row.fault for row in rows] == [case.fault for case in CASES]
