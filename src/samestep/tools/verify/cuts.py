"""What losses of pieces of a shard tell of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.tools.verify.causes import Cause, Finding
from samestep.tools.verify.difference import Difference

Cut = Mapping[str, Any]

# Losses are float32: the same penalty comes out the same to this.
_SAME = 1e-3


def cut_finding(notes: Sequence[Mapping[str, Any]]) -> Finding | None:
    """The mistake, if the loss is not the sum of its pieces; it would show on one process too.

    Means of means lie between the means of the pieces; something that is added once a shard leaves the same behind
    wherever the shard is cut. A loss that does neither compares samples with each other, and may be meant so.
    """
    cuts = [cut for note in notes for cut in note["cuts"]]
    if not cuts:
        return None
    if len(cuts) > 1 and _leave_the_same(cuts):
        what = "something is counted once a shard"
    elif all(_is_between(cut) for cut in cuts):
        what = "a mean of means: it lies between the pieces, and is not weighted by what they count"
    else:
        return None
    note = next(note for note in notes if note["cuts"])
    cut = note["cuts"][0]
    first = Difference(quantity="loss", stage="loss", step=note["step"], shard=note["shard"])
    evidence = (
        f"its {note['size']} samples give a summed loss of {cut['sum']:.6g} over a count of {cut['count']:g}; cut "
        f"after {cut['at']}, the two pieces give {cut['sum_of_pieces']:.6g} over {cut['count_of_pieces']:g}",
        f"so the result depends on how a batch is cut into shards: {what}",
    )
    return Finding(Cause.LOSS, first, evidence)


def cut_notes(notes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What could not be told."""
    if notes and not any(note["checked"] for note in notes):
        return ("whether the loss adds up over pieces of a shard cannot be seen: outputs or targets have no rows",)
    if any(note["cuts"] for note in notes) and cut_finding(notes) is None:
        return (
            "the loss of a shard is neither the sum of its pieces nor a mean of them: it compares samples with each "
            "other. Each shard computes its own, so the number of shards is part of what is trained",
        )
    return ()


def _is_between(cut: Cut) -> bool:
    whole, first, rest = (float(mean) for mean in cut["means"])
    pieces = (first, rest)
    slack = _SAME * max(abs(piece) for piece in pieces)
    return min(pieces) - slack <= whole <= max(pieces) + slack


def _leave_the_same(cuts: Sequence[Cut]) -> bool:
    left = [float(cut["sum_of_pieces"]) - float(cut["sum"]) for cut in cuts]
    return max(left) - min(left) <= _SAME * max(abs(float(cut["sum"])) for cut in cuts)
