"""Whether a loss is a sum over samples: the condition under which it does not matter how a batch is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from samestep.data.batch import Shard
from samestep.data.tensors import map_tensors
from samestep.engine.loss import Loss, LossFunction
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.plain_loss import in_parts

# Far above rounding of a float32 sum, far below what a wrong divisor does.
_TOLERANCE = 1e-4

SizedLoss = Callable[[Any, Any, int], Loss]


def additivity(loss: LossFunction | MultiLoss, outputs: Any, part: Shard) -> dict[str, Any]:
    """Cut a shard's outputs and targets in two, at several places, and compare the loss with that of the pieces.

    The model takes no part in it, so neither batch norm nor dropout can disturb the comparison.

    Returns:
        `checked`: whether outputs and targets can be cut, and `cuts`: where the pieces do not add up.
    """
    targets = part.data[1]
    if part.size < 2 or not (_can_be_cut(outputs, part.size) and _can_be_cut(targets, part.size)):
        return {"checked": False, "shard": part.number, "cuts": []}
    cuts = []
    with torch.no_grad():
        for each in in_parts(loss).parts:
            cuts += _cuts(each.loss_of, outputs, targets, part.size)
    return {"checked": True, "shard": part.number, "size": part.size, "cuts": cuts}


def _cuts(loss: SizedLoss, outputs: Any, targets: Any, size: int) -> list[dict[str, Any]]:
    cuts = []
    whole = loss(outputs, targets, size)
    for place in sorted({1, size // 3 or 1, size // 2}):
        first = loss(_cut(outputs, size, 0, place), _cut(targets, size, 0, place), place)
        rest = loss(_cut(outputs, size, place, size), _cut(targets, size, place, size), size - place)
        sums = float(first.sum) + float(rest.sum)
        counts = float(first.count) + float(rest.count)
        if not (_agree(sums, float(whole.sum)) and _agree(counts, float(whole.count))):
            cut = {"at": place, "sum": float(whole.sum), "sum_of_pieces": sums}
            cut |= {"count": float(whole.count), "count_of_pieces": counts}
            cuts.append(cut | {"means": [_mean(piece) for piece in (whole, first, rest)]})
    return cuts


def _mean(piece: Loss) -> float:
    return float(piece.sum) / float(piece.count) if float(piece.count) else 0.0


def _agree(value: float, other: float) -> bool:
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


def _can_be_cut(data: Any, size: int) -> bool:
    if isinstance(data, torch.Tensor):
        return data.dim() > 0 and data.shape[0] > 0 and data.shape[0] % size == 0
    if isinstance(data, Mapping):
        return all(_can_be_cut(value, size) for value in data.values())
    if isinstance(data, list | tuple):
        return all(_can_be_cut(value, size) for value in data)
    return False


def _cut(data: Any, size: int, start: int, stop: int) -> Any:
    """Rows of the samples from `start` to `stop`; a tensor may have several rows a sample."""
    return map_tensors(data, lambda tensor: tensor[start * len(tensor) // size : stop * len(tensor) // size])
