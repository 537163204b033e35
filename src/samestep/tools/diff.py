"""`samestep diff`: recipes, environments and logged checksums of two runs, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samestep.errors import InputError
from samestep.recipes.recipe_files import differences
from samestep.tools.run_log import Run

# Entries of `environment.json` that belong to one start.
_OF_START = (
    *("started", "from_step", "sources", "remark", "batch_size"),
    *("script", "directory", "started_as", "keep"),
)


@dataclass(frozen=True)
class Comparison:
    """Logs of two runs."""

    recipe: list[str]  # differences of the recipes, one line per key
    environment: list[str]  # differences of the last starts, one line per key
    last_equal: int  # last step with equal checksums; 0 for none
    first_different: int | None  # first step with different checksums
    compared: int  # number of steps with checksums of both runs


def compare_logs(one: Run, other: Run) -> Comparison:
    """Compare recipes, environments and checksums of two runs.

    Raises:
        InputError: the runs have no checksums of the same steps, although their recipes are equal.
    """
    recipe = differences(one.recipe, other.recipe)
    checksums = one.events.checksums
    others = other.events.checksums
    common = sorted(checksums.keys() & others.keys())
    if not common and not recipe:
        raise InputError(
            f"{one.folder} and {other.folder} have no checksums of the same steps",
            expected="runs of this version, with --checksum-every above 0",
            fix="train with --checksum-every 1",
            code="E_NO_CHECKSUM",
        )
    first = next((step for step in common if checksums[step] != others[step]), None)
    equal = max((step for step in common if first is None or step < first), default=0)
    environment = differences(_environment(one), _environment(other))
    return Comparison(recipe, environment, equal, first, len(common))


def _environment(run: Run) -> dict[str, Any]:
    start = run.starts[-1] if run.starts else {}
    entry = {key: value for key, value in start.items() if key not in _OF_START}
    if isinstance(start.get("sources"), dict):
        entry["modules"] = dict(start["sources"])
    return entry
