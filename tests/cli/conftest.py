"""Fixtures for tests of commands."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import tree
from samestep.cli.main import main
from samestep.errors import EXIT_INPUT


@pytest.fixture
def check_error() -> Callable[[str], None]:
    """Return a function that checks that a report has one value, one expectation and one fix."""

    def check(err: str) -> None:
        assert err.startswith("error: "), err
        for part in ("error: ", "  expected: ", "  fix:      "):
            assert len(re.findall(rf"^{part}\S", err, re.MULTILINE)) == 1, err
        assert "Traceback" not in err
        assert len(err.splitlines()) < 25, "more than a screen"

    return check


@pytest.fixture
def refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    check_error: Callable[[str], None],
) -> Callable[..., str]:
    """Return a function that runs an invalid command, checks that no file changes, and returns the error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> str:
        before = tree(tmp_path)
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        assert code == EXIT_INPUT, output.err
        assert output.out == ""
        check_error(output.err)
        assert tree(tmp_path) == before
        return output.err

    return run
