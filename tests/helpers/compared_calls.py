"""Checks of `workers.view_calls` on real ranks: gradients of divided calls, compared with those of the plain loop."""

from collections.abc import Sequence
from typing import Any

from helpers.forked_ranks import Job, run_jobs

TOLERANCE = 1e-12
# Divided calls at least, and calls after the trial that are whole.
COMPARED = {
    "several_calls": (11, 0),
    "parameters_used_outside": (3, 0),
    "frozen_parts": (3, 0),
    "absent_gradients": (3, 0),
    "graph_kept": (3, 0),
    "gradients_of_some_parameters": (19, 0),
    "gradient_penalty": (3, 0),
    "squares_of_gradients": (3, 0),
    "hooks_of_parameters": (7, 0),
    "layouts_and_dtypes": (3, 0),
    "tied_and_recurrent": (3, 0),
    "random_layers": (3, 0),
}
# Forms of a check.
SEVERAL = {
    "checkpointing": 2,
    "accumulation": 4,
}


def results_of_ranks(ranks: int, names: Sequence[str], **options: Any) -> dict[str, list[Any]]:
    """Return the result of each rank by the name of the check."""
    job = Job("run", ranks, {"names": list(names), **options})
    (results,) = run_jobs("workers.view_calls", job, timeout=400)
    return results


def require_gradients(results: Sequence[Any], divided: int, whole: int) -> None:
    """Require equal gradients, at least `divided` divided calls, and `whole` whole ones after the trial."""
    for result in results:
        assert isinstance(result, list), result
        assert result[0] <= TOLERANCE
        assert result[1] >= divided
        assert result[2] == whole


def require_forms(results: Sequence[Any], forms: int, divided: int) -> None:
    """Require equal gradients in all forms of a check, each with at least `divided` divided calls and no whole one."""
    for result in results:
        assert isinstance(result, list), result
        assert len(result) == forms
        for form in result:
            require_gradients([form], divided, 0)
