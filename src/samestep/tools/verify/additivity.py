"""Additivity of a loss: the loss of a microbatch is the sum of the losses of its pieces."""

from __future__ import annotations

from typing import Any

import torch

from samestep.data.batch import Microbatch
from samestep.distributed.rng import generator_state, preserved_generators
from samestep.engine.loss import Loss, LossFunction, as_step_loss
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.nested_data import has_rows, rows

# Far above the rounding of a float32 sum, far below the effect of a wrong divisor.
_TOLERANCE = 1e-4


def check_additivity(loss: LossFunction | MultiLoss, outputs: Any, microbatch: Microbatch) -> dict[str, Any]:
    """Split outputs and targets of a microbatch at several positions and compare the loss with that of the pieces.

    The model is not called, so neither batch norm nor dropout can affect the comparison.

    Returns:
        `checked`: whether outputs and targets can be split; `cuts`: positions at which the pieces do not add up;
        `repeats`: false if a second call has another value.
    """
    targets, size = microbatch.data[1], microbatch.size
    step_loss, cuts = as_step_loss(loss), []
    unchecked = {"checked": False, "microbatch": microbatch.number, "cuts": []}
    if size < 2 or not (has_rows(outputs, size) and has_rows(targets, size)):
        return unchecked
    with torch.no_grad(), preserved_generators():
        whole = step_loss.term_losses(outputs, targets, size)
    with torch.no_grad():
        before = generator_state()
        again = step_loss.term_losses(outputs, targets, size)
        if [float(term.sum) for term in whole] != [float(term.sum) for term in again]:
            return {**unchecked, "repeats": False}
        is_random = generator_state() != before  # pieces draw other numbers
        if is_random:
            return unchecked
        for position in sorted({1, size // 3 or 1, size // 2}):
            pieces = [
                step_loss.term_losses(rows(outputs, size, *piece), rows(targets, size, *piece), piece[1] - piece[0])
                for piece in ((0, position), (position, size))
            ]
            compared = [_compare_pieces(*terms) for terms in zip(whole, *pieces, strict=True)]
            cuts += [{"at": position, **cut} for cut in compared if cut is not None]
    return {"checked": True, "microbatch": microbatch.number, "size": size, "cuts": cuts}


def _compare_pieces(whole: Loss, first: Loss, rest: Loss) -> dict[str, Any] | None:
    """Return sums, counts and means if those of the pieces do not add up to those of the whole."""
    total, count = float(whole.sum), float(whole.count)
    totals, counts = float(first.sum) + float(rest.sum), float(first.count) + float(rest.count)
    if _is_close(totals, total) and _is_close(counts, count):
        return None
    means = [float(loss.sum) / float(loss.count) if float(loss.count) else 0.0 for loss in (whole, first, rest)]
    return {"sum": total, "sum_of_pieces": totals, "count": count, "count_of_pieces": counts, "means": means}


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))
