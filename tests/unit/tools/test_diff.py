"""Comparison of the logs of two runs."""

from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import START, make_run
from samestep.errors import InputError
from samestep.recipes.recipe_files import load_recipe, recipe_data
from samestep.tools.diff import Comparison, compare_logs
from samestep.tools.run_log import read_runs


def checksum(step: int, value: str) -> dict[str, Any]:
    return {"time": START + step, "event": "checksum", "step": step, "checksum": value}


def resume(step: int) -> dict[str, Any]:
    return {"time": START + 50, "event": "resume", "step": step, "epoch": 0, "samples": 0, "text": ""}


def compared(folder: Path, *logs: list[dict[str, Any]]) -> Comparison:
    """Return the comparison of two runs of one recipe."""
    recipe = recipe_data(load_recipe("digits", ["step.reduction=exact"]))
    runs = [make_run(folder / str(number), log, **recipe) for number, log in enumerate(logs)]
    return compare_logs(*read_runs(runs))


def test_first_different_step_is_the_first_one_with_checksums_of_both_runs(tmp_path: Path) -> None:
    one = [checksum(step, "a") for step in (2, 4, 6, 8)]
    other = [checksum(step, "a" if step < 6 else "b") for step in (3, 4, 6, 7, 8, 9, 10)]
    result = compared(tmp_path, one, other)
    assert (result.last_equal, result.first_different, result.compared) == (4, 6, 3)
    assert result.recipe == result.environment == []


def test_checksums_after_the_step_of_a_resumption_do_not_count(tmp_path: Path) -> None:
    one = [checksum(step, "a") for step in range(1, 7)]
    other = [checksum(1, "a"), checksum(2, "a"), checksum(3, "b"), checksum(4, "b"), resume(2), checksum(3, "a")]
    result = compared(tmp_path, one, other)
    assert (result.last_equal, result.first_different, result.compared) == (3, None, 3)


def test_runs_without_checksums_of_the_same_steps(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        compared(tmp_path, [checksum(1, "a")], [checksum(2, "a")])
    assert caught.value.code == "E_NO_CHECKSUM"
    assert "--checksum-every 1" in caught.value.fix
