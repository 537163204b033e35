"""Weight of the foreground in a segmentation loss, from the masks of the training data."""

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

    The weight is the number of background pixels divided by the number of foreground pixels. Each
    rank counts some of the masks; counts are integers, so their sums do not depend on the number of
    ranks.

    Raises:
        RecipeError: the dataset has no binary masks, or they have no foreground.
        DataError: a mask cannot be used and `bad_samples` is `stop`.
    """
    if loss.options.get("foreground_weight") != "from_masks":
        return loss, ()
    background, foreground, unusable = _count_pixels(splits, bad_samples, world)
    if not foreground:
        raise RecipeError(
            f"loss.options.foreground_weight is from_masks: {background} background pixels, no foreground",
            expected="binary masks with some foreground",
            fix="for several classes: --set 'loss={name: cross_entropy}'; otherwise correct data.options.mask_values",
            code="E_INCOMPATIBLE",
        )
    weight = background / foreground
    share = 100 * foreground / (background + foreground)
    left_out = f"; {unusable} masks cannot be used" if unusable else ""
    note = f"foreground weight {weight:.6g}: {share:.3g} % of the training masks is foreground{left_out}"
    return replace(loss, options=dict(loss.options) | {"foreground_weight": weight}), (note,)


def _count_pixels(splits: Splits, bad_samples: BadSamples, world: World) -> tuple[int, int, int]:
    """Return background pixels, foreground pixels and unusable masks over all ranks."""
    if splits.count_foreground is None:
        return 0, 0, 0
    background = foreground = 0
    errors: list[int] = []
    for index in range(world.rank, len(splits.train), world.size):
        world.session.status.heartbeat()
        try:
            counts = splits.count_foreground(index)
        except DataError:
            errors.append(index)
        else:
            background += counts[0]
            foreground += counts[1]
    gathered = all_gather([background, foreground, errors], world)
    unusable = sorted(index for _, _, indices in gathered for index in indices)
    if unusable and bad_samples == "stop":
        splits.count_foreground(unusable[0])  # raises the same error on every rank
    return (
        sum(counts[0] for counts in gathered),
        sum(counts[1] for counts in gathered),
        len(unusable),
    )
