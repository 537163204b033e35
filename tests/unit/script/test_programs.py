"""Programs that a script runs, on rank 0 alone."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.distributed.status import local_rank_status
from samestep.errors import RunError
from samestep.script.programs import FirstRankPrograms

APPEND = "echo line >> log.txt"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FirstRankPrograms]:
    """Two ranks in one process, of which the first runs before the second."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return [FirstRankPrograms(rank, str(folder), local_rank_status(), lambda: False) for rank in range(2)]


def test_program_runs_once(ranks: list[FirstRankPrograms]) -> None:
    for rank in ranks:
        with rank.installed():
            codes = [os.system(APPEND), os.system(APPEND)]
            codes.append(subprocess.run(APPEND, shell=True, check=True).returncode)
        assert codes == [0] * 3
    assert Path("log.txt").read_text(encoding="utf-8") == "line\n" * 3


@pytest.mark.parametrize("is_text", [True, False])
def test_output_is_that_of_rank_0(ranks: list[FirstRankPrograms], is_text: bool) -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getpid()); print('no', file=sys.stderr); sys.exit(3)"]
    done = []
    for rank in ranks:
        with rank.installed():
            done.append(subprocess.run(command, capture_output=True, text=is_text, check=False))
    first, second = done
    assert first.returncode == second.returncode == 3
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)
    assert first.stderr == ("no\n" if is_text else b"no\n")


def test_functions_of_subprocess_use_it(ranks: list[FirstRankPrograms]) -> None:
    seen: list[Any] = []
    for rank in ranks:
        with rank.installed():
            code = subprocess.call(APPEND, shell=True)
            text = subprocess.check_output("cat log.txt; echo $$", shell=True, text=True)
            seen.append((code, text, subprocess.getoutput("cat log.txt")))
    assert seen[0] == seen[1]
    assert Path("log.txt").read_text(encoding="utf-8") == "line\n"


@pytest.mark.parametrize(
    ("command", "options", "kind"),
    [
        ("exit 4", {"shell": True, "check": True}, subprocess.CalledProcessError),
        ("sleep 5", {"shell": True, "timeout": 0.05}, subprocess.TimeoutExpired),
        (["no-such-program"], {}, FileNotFoundError),
        ("printf '\\377'", {"shell": True, "capture_output": True, "text": True}, UnicodeDecodeError),
    ],
)
def test_errors_are_those_of_rank_0(
    ranks: list[FirstRankPrograms], command: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    errors = []
    for rank in ranks:
        with pytest.raises(kind) as raised, rank.installed():
            subprocess.run(command, **options)  # noqa: PLW1510
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_started_programs_are_named_once_on_rank_0(
    ranks: list[FirstRankPrograms], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("samestep"), "propagate", True)
    caplog.set_level(logging.INFO, "samestep")
    before = (subprocess.Popen.__init__, subprocess.run, subprocess.call, os.system)
    for rank in ranks:
        with rank.installed():
            for _ in range(2):
                assert subprocess.Popen(["true", "x"]).wait() == 0
            subprocess.run(["true"], check=True)
            os.system("true")
    assert (subprocess.Popen.__init__, subprocess.run, subprocess.call, os.system) == before
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.partition(" ")[2] == "starts the program 'true', on every process"
    assert "test_programs.py:" in message


def test_program_that_rank_0_has_passed_is_an_error_with_the_line(tmp_path: Path) -> None:
    programs = FirstRankPrograms(1, str(tmp_path), local_rank_status(), lambda: True)
    message = r"test_programs\.py:\d+: the program did not run to its end on rank 0"
    with pytest.raises(RunError, match=message), programs.installed():
        os.system("true")
