"""Every fault either leaves the weights as they would have been, or ends the run with one report and a way to go on.

What is observed of each is in docs/faults.md, which `make faults` writes.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fault_cases import CASES, LOOP, RECIPE, RUN, SAVING, Case
from fault_page import PAGE, Row, read_rows, write_page
from shared_memory import abandoned, require_none_left
from system import Done, Running, here, samestep, steps_saved, until, weights

REPORT_SECONDS = 10
LONGEST = 130
# Times, process ids and ports.
STEADY = ((r"\d+\.\d+ s\b", "N s"), (r"pid\(s\) \d+|pid \d+", "pid N"), (r"port \d+", "port N"))
_rows: dict[str, Row] = {}


@dataclass(frozen=True)
class Undisturbed:
    """The weights of runs that nothing happened to."""

    recipe: tuple[str, str]
    loop: tuple[str, str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    place = tmp_path_factory.mktemp("undisturbed")
    assert here("train", RECIPE, "--name", "a", cwd=place) == 0
    assert samestep("run", "--processes", 2, LOOP, "", 0, 0, 0, cwd=place).code == 0
    return Undisturbed(weights(place / RUN), loop_weights(place))


@pytest.fixture(scope="module", autouse=True)
def page(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--faults-page"):
        assert len(_rows) == len(CASES), "the page is written from all cases"
        write_page([_rows[case.fault] for case in CASES])


def loop_weights(place: Path) -> tuple[str, str]:
    shutil.rmtree(place / "as-run", ignore_errors=True)
    shutil.copytree(place / "loop", place / "as-run/checkpoints", symlinks=True)
    return weights(place / "as-run")


def ended(running: Running, case: Case, place: Path) -> tuple[Done, float]:
    """How it ended, and how many seconds after the fault."""
    done = running.wait(90)
    fired = place / "fired.json"
    return done, time.time() - fired.stat().st_mtime if fired.exists() else 0.0


def marks(case: Case) -> list[pytest.MarkDecorator]:
    if case.is_variant:
        return [pytest.mark.long]
    return [] if case.is_quick else [pytest.mark.slow]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.fault, marks=marks(case)) for case in CASES])
def test_fault(case: Case, undisturbed: Undisturbed, tmp_path: Path) -> None:
    before = abandoned()
    is_loop = case.command[0] == "run"
    if case.brought is not None:
        (tmp_path / "fault.json").write_text(json.dumps(case.brought), encoding="utf-8")
    (tmp_path / "fault").touch()
    if case.before is not None:
        case.before(tmp_path)
    is_counted = is_loop or "--processes" in case.options or case.variables
    machine = () if is_counted else ("--processes", 4)
    saving = () if is_loop else SAVING
    given = (*case.command, *saving, *machine, *case.options)
    with Running(*given, cwd=tmp_path, variables=case.variables) as running:
        if case.act is not None:
            case.act(running, tmp_path)
        done, seconds = ended(running, case, tmp_path)
        until(lambda: not running.processes(), "no process is left", 30)
    assert done.code == case.code, done.err
    if case.code:
        assert seconds < REPORT_SECONDS, done.err
    report = reported(done, case)
    for text in case.also:
        assert text in done.err
    require_none_left(before)
    went_on = "" if case.code == 0 else gone_on(case, tmp_path)
    found, wanted = (
        (loop_weights(tmp_path), undisturbed.loop) if is_loop else (weights(tmp_path / RUN), undisturbed.recipe)
    )
    assert found == wanted
    _rows[case.fault] = Row(case.fault, case.expected, observed(case, report, done, went_on))


def reported(done: Done, case: Case) -> str:
    """The first line of its one report."""
    titles = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(titles) == (1 if case.told else 0), done.err
    if not case.told:
        return ""
    assert re.match(case.told, titles[0]), done.err
    return titles[0].removeprefix("error: ")


def gone_on(case: Case, place: Path) -> str:
    """Go on with what has ended; in words."""
    if case.command[0] == "run":
        assert samestep("run", "--processes", case.resume_on, LOOP, "", 0, 0, 0, cwd=place).code == 0
        return f"the same command on {case.resume_on}: the same weights"
    if case.resume_on == 0:  # what was lost is put back
        (place / RUN / "checkpoints").unlink()
        (place / RUN / "elsewhere").rename(place / RUN / "checkpoints")
    number = case.resume_on or 1
    if not (place / RUN).exists() or not steps_saved(place / RUN):
        shutil.rmtree(place / RUN, ignore_errors=True)
        assert here("train", RECIPE, "--name", "a", "--processes", number, cwd=place) == 0
        return f"begun again on {number}: the same weights"
    assert here("resume", RUN, "--processes", number, cwd=place) == 0
    return f"resumed on {number}: the same weights"


def observed(case: Case, report: str, done: Done, went_on: str) -> str:
    """What is told of it, without what differs from time to time."""
    told = [line for line in done.err.splitlines() if line.startswith(("restart ", "a checkpoint is ", "rank "))]
    quoted = [f"`{steady(text)}`" for text in (report, *told) if text]
    parts = [f"exit code {case.code}" if case.code >= 0 else "killed", *quoted, went_on]
    parts.append("the same weights" if case.code == 0 else "")
    return "; ".join(filter(None, parts))


def steady(text: str) -> str:
    """A line without numbers that differ from time to time, and not too long."""
    for pattern, shown in STEADY:
        text = re.sub(pattern, shown, text)
    return text if len(text) < LONGEST else f"{text[: LONGEST - 4]} ..."


def test_the_page_has_every_fault_with_what_is_expected_of_it(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--faults-page"):
        pytest.skip("it is written when all cases are done")
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    assert [(row.fault, row.expected) for row in rows] == [(case.fault, case.expected) for case in CASES]
    assert len([case for case in CASES if not case.is_variant]) >= 30
