"""Agreement of all ranks at the end of a divided call: one word about the own slices."""

from __future__ import annotations

from samestep.view.actions import Action
from samestep.view.divided import DividedCall, OwnResult
from samestep.view.kinds import Kind, numbers_hash, operations_hash
from samestep.view.view import View

OTHER_OPERATIONS = "operations that were not tried"
_BRANCHES = "operations that differ between rows"
_ENDED_EARLY = "a rank could not compute its rows alone"
# Status of a rank at the end of a divided call.
_OK = 1
_FAILED = 2
_UNKNOWN = 3  # operations that were not tried, or changes of state that were not watched
_OTHER_SHAPES = 4  # outputs of its slices differ
_OTHER_NUMBERS = 5
_OTHER_BRANCHES = 6  # operations of its slices differ


def difference_between_ranks(
    view: View, kind: Kind, divided: DividedCall, results: list[OwnResult] | None
) -> str | None:
    """Exchange one word about the own slices; return why the call must be computed whole, if it must."""
    if divided.exchange.is_known_to_all:
        return _ENDED_EARLY
    words = view.word(Action.END_CALL, *_facts(kind, divided, results))
    if any(word[0] == Action.SUM_IN_CALL for word in words):
        return _ENDED_EARLY
    view.require_same_action(words)
    statuses, lists, shapes, numbers = (
        set(column) for column in list(zip(*words, strict=True))[2:6]
    )
    difference = None
    if _FAILED in statuses:
        difference = _ENDED_EARLY
    elif _OTHER_BRANCHES in statuses or len(lists) > 1:
        difference = _BRANCHES
    elif _UNKNOWN in statuses:
        difference = OTHER_OPERATIONS
    elif _OTHER_SHAPES in statuses or len(shapes) > 1:
        difference = "outputs of other shapes in some rows"
    elif _OTHER_NUMBERS in statuses or len(numbers) > 1:
        difference = "Python numbers that differ between rows"
    return difference


def _facts(kind: Kind, divided: DividedCall, results: list[OwnResult] | None) -> list[int]:
    """Return the status of this rank, and the facts that all slices share: operations, shapes, numbers."""
    if results is None or not all(
        divided.fits(place, one, kind.outputs) for place, one in enumerate(results)
    ):
        return [_FAILED, 0, 0, 0]
    every = [
        (
            tuple(one.operations.functions),
            divided.shapes_hash(one),
            numbers_hash(one.operations.numbers),
        )
        for one in results
    ]
    operations, shapes, numbers = every[0]
    status = _OK
    if any(other[0] != operations for other in every):
        status = _OTHER_BRANCHES
    elif divided.has_other_changes or not kind.divides(operations):
        status = _UNKNOWN
    elif any(other[1] != shapes for other in every):
        status = _OTHER_SHAPES
    elif any(other[2] != numbers for other in every):
        status = _OTHER_NUMBERS
    return [status, operations_hash(operations), shapes, numbers]
