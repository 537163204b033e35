"""How much foreground outweighs background in a loss, counted once in the masks that are trained on."""

from __future__ import annotations

from dataclasses import replace

from samestep.config import BadSamples, Part
from samestep.errors import DataError, RecipeError
from samestep.recipes.splits import Splits
from samestep.runtime.gather import all_gather
from samestep.runtime.world import World

FROM_MASKS = "from_masks"


def with_foreground_weight(
    loss: Part, splits: Splits, bad_samples: BadSamples, world: World
) -> tuple[Part, tuple[str, ...]]:
    """A loss whose option `foreground_weight` is a number, and a note of it; every rank calls it and gets the same.

    The number is that of background pixels a foreground pixel, in the files as they are. Each rank counts its part of
    the masks; the counts are whole numbers, so their sums do not depend on who counts.

    Raises:
        RecipeError: the data has no binary masks.
        DataError: a mask cannot be used and `bad_samples` is `stop`, or there is no foreground.
    """
    if loss.options.get("foreground_weight") != FROM_MASKS:
        return loss, ()
    if splits.foreground_of is None:
        raise RecipeError(
            "loss.options.foreground_weight is from_masks, but the data has no binary masks",
            rule="from_masks counts foreground and background of binary masks",
            do="data with binary masks, or a number",
        )
    background, foreground, unusable = _counted(splits, bad_samples, world)
    if not foreground:
        raise DataError(
            f"the masks to train on have {background} pixels and no foreground",
            rule="from_masks divides background by foreground",
            do="look at the masks and at data.options.mask_values, or give foreground_weight as a number",
        )
    weight = background / foreground
    share = 100 * foreground / (background + foreground)
    left_out = f"; {unusable} of them cannot be used" if unusable else ""
    note = f"foreground weight {weight:.6g}: {share:.3g} % of the masks that are trained on is foreground{left_out}"
    return replace(loss, options=dict(loss.options) | {"foreground_weight": weight}), (note,)


def _counted(splits: Splits, bad_samples: BadSamples, world: World) -> tuple[int, int, int]:
    """Background, foreground, and masks that cannot be used, over all ranks.

    Ranks meet before the first of the masks that cannot be used is raised, by the rank that met it, so that it is the
    same one on any number of them.
    """
    assert splits.foreground_of is not None
    background = foreground = 0
    bad: dict[int, DataError] = {}
    for index in range(world.rank, len(splits.train), world.size):
        world.pulse.tick()
        try:
            here, there = splits.foreground_of(index)
        except DataError as error:
            bad[index] = error
        else:
            background, foreground = background + here, foreground + there
    found = all_gather([background, foreground, sorted(bad)], world)
    unusable = sorted(index for _, _, indices in found for index in indices)
    if unusable and bad_samples == "stop":
        if unusable[0] in bad:
            raise bad[unusable[0]]
        world.barrier()  # the rank that met it does not come
    return sum(each[0] for each in found), sum(each[1] for each in found), len(unusable)
