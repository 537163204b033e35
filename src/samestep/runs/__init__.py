"""Run directories: names of runs, entries of starts, and the directory of a custom loop."""

from __future__ import annotations

from pathlib import Path

from samestep.errors import InputError

LOOP = "run.json"  # marks the run directory of a custom loop


def require_run_name(name: str, fix: str) -> None:
    """Require that a name is that of a folder, without separators.

    Raises:
        InputError: the name is empty, a path, or has unprintable characters.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise InputError(
            f"the name of the run is {name!r}",
            expected="the name of a folder in runs, without separators",
            fix=fix,
            code="E_RUN_NAME",
        )


def not_a_run(folder: Path) -> InputError:
    """Return the error of a directory that is not that of a run."""
    expected = f"a run directory, which contains recipe.yaml or {LOOP}"
    return InputError(f"{folder} is not a run", expected, "check the path", code="E_NOT_A_RUN")
