"""Check whether the microbatches of a recipe fit into memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from signal import SIGKILL
from typing import Any

from samestep.config import Recipe
from samestep.launcher.launch import RankError

_ONEDNN_NO_MEMORY = re.compile(r"could not create a (primitive|memory)")


@dataclass(frozen=True)
class Inspection:
    """Properties of a recipe, from two training steps."""

    device: str
    workers: int  # default number of loader processes
    peak: int  # peak memory in bytes of the GPU, or of the process on a CPU; the largest of all ranks
    norms: int  # number of layers
    dropouts: int  # number of layers
    has_images: bool  # the model has 4D inputs, which can be channels-last


def check_memory(
    recipe: Recipe, limit: int | None, inspect: Callable[[Recipe], Inspection], report: Callable[[str], None]
) -> tuple[dict[str, Any], Inspection | None]:
    """Check whether the microbatches fit; if not, double their number until they do; return the result as plain data.

    Args:
        recipe: recipe to check.
        limit: memory limit of a rank in bytes; None for no limit.
        inspect: trains two steps of a recipe in new ranks.
        report: receives progress messages.

    Raises:
        RankError: a rank failed for another reason than memory.
    """

    def attempt(variant: Recipe) -> Inspection | str:
        try:
            return inspect(variant)
        except RankError as error:
            if not _is_out_of_memory(error, limit):
                raise
            return str(error).splitlines()[0]

    microbatches, samples = recipe.microbatch_count, _largest_microbatch(recipe)
    report(f"memory: a microbatch of {samples} samples")
    first = attempt(recipe)
    inspection = first if isinstance(first, Inspection) else None
    tried: list[dict[str, Any]] = []
    enough, changes = None, list[str]()
    while inspection is None and enough is None and microbatches < recipe.batch_size:
        microbatches = min(2 * microbatches, recipe.batch_size)
        report(f"memory: does not fit; trying {microbatches} microbatches")
        variant = replace(recipe, microbatches=microbatches)
        result = attempt(variant)
        tried.append({"microbatches": microbatches, "fits": isinstance(result, Inspection)})
        if isinstance(result, Inspection):
            enough, changes = microbatches, list(_changes(recipe, variant, result))
    data = {
        "limit_bytes": limit,
        "microbatches": recipe.microbatches,
        "samples_in_a_microbatch": samples,
        "fits": inspection is not None,
        "peak_bytes": inspection.peak if inspection is not None else None,
        "tried": tried,
        "microbatches_that_fit": enough,
        "changes": changes,
        "message": "" if isinstance(first, Inspection) else first,
    }
    return data, inspection


def _changes(before: Recipe, after: Recipe, inspection: Inspection) -> Iterator[str]:
    """Yield the effects of another number of microbatches, other than rounding."""
    if inspection.norms and before.step.batch_norm == "microbatch":
        yield f"batch norm is over {_largest_microbatch(after)} instead of {_largest_microbatch(before)} samples"
    if inspection.dropouts:
        yield "dropout uses other masks"


def _is_out_of_memory(error: RankError, limit: int | None) -> bool:
    # Without a limit, the system kills the process; with a limit, libraries fail in various ways.
    failure = error.failure
    is_killed = failure.by_signal == SIGKILL or (limit is not None and failure.kind is None)
    is_onednn = limit is not None and _ONEDNN_NO_MEMORY.search(failure.text) is not None
    return failure.is_out_of_memory or is_killed or is_onednn


def _largest_microbatch(recipe: Recipe) -> int:
    return -(-recipe.batch_size // recipe.microbatch_count)
