"""Weight of the foreground from the masks of the training data."""

from __future__ import annotations

from dataclasses import replace

from samestep.config import BadSamples, NamedConfig
from samestep.distributed.world import World, all_gather
from samestep.errors import DataError, RecipeError
from samestep.zoo.splits import Splits


def resolve_foreground_weight(
    loss: NamedConfig, splits: Splits, bad_samples: BadSamples, world: World
) -> tuple[NamedConfig, tuple[str, ...]]:
    """Return the loss with a number as `foreground_weight`, and a note. A collective operation.

    The weight is the number of background pixels divided by the number of foreground pixels. Each rank counts some of
    the masks; counts are integers, so their sums do not depend on the number of ranks.

    Raises:
        RecipeError: the dataset has no binary masks.
        DataError: a mask cannot be used and `bad_samples` is `stop`, or there is no foreground.
    """
    if loss.options.get("foreground_weight") != "from_masks":
        return loss, ()
    if splits.count_foreground is None:
        raise RecipeError(
            "loss.options.foreground_weight is from_masks, but the data has no binary masks",
            expected="a number, or from_masks for data with binary masks",
            fix="--set loss.options.foreground_weight=5.0",
            code="E_INCOMPATIBLE",
        )
    background, foreground, unusable = _count_pixels(splits, bad_samples, world)
    if not foreground:
        raise DataError(
            f"the training masks have {background} background pixels and no foreground",
            expected="some foreground; from_masks divides background by foreground",
            fix="correct the masks or data.options.mask_values, or set loss.options.foreground_weight to a number",
            code="E_MASK",
        )
    weight = background / foreground
    share = 100 * foreground / (background + foreground)
    left_out = f"; {unusable} masks cannot be used" if unusable else ""
    note = f"foreground weight {weight:.6g}: {share:.3g} % of the training masks is foreground{left_out}"
    return replace(loss, options=dict(loss.options) | {"foreground_weight": weight}), (note,)


def _count_pixels(splits: Splits, bad_samples: BadSamples, world: World) -> tuple[int, int, int]:
    """Return background pixels, foreground pixels and unusable masks over all ranks.

    The error of the first unusable mask is raised after the exchange, so it is the same for every number of ranks.
    """
    assert splits.count_foreground is not None
    counts: list[tuple[int, int]] = []
    errors: dict[int, DataError] = {}
    for index in range(world.rank, len(splits.train), world.size):
        world.context.status.heartbeat()
        try:
            counts.append(splits.count_foreground(index))
        except DataError as error:
            errors[index] = error
    background, foreground = (sum(column) for column in zip((0, 0), *counts, strict=True))
    gathered = all_gather([background, foreground, sorted(errors)], world)
    unusable = sorted(index for _, _, indices in gathered for index in indices)
    if unusable and bad_samples == "stop":
        if unusable[0] in errors:
            raise errors[unusable[0]]
        world.barrier()  # ends with the error of the rank that raises
    return sum(counts[0] for counts in gathered), sum(counts[1] for counts in gathered), len(unusable)
