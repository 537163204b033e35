"""Whether the recipe's shards fit into memory, and how many shards would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from signal import SIGKILL
from typing import Any

from samestep.config import Recipe
from samestep.runtime.launch import RankError
from samestep.tools.tune.look import Look

# What oneDNN says where it gets no memory.
_ONEDNN = re.compile(r"could not create a (primitive|memory)")


@dataclass(frozen=True)
class Memory:
    """What was found of memory.

    Attributes:
        limit: bytes that a rank was allowed; None for all that there is.
        shards: of the recipe.
        samples: in the largest of them.
        fits: whether they can be computed.
        peak: bytes that a rank took; None where they cannot.
        tried: more shards that were tried in turn, each with whether they fit.
        changes: what as many shards as fit would change.
        said: what the rank said that ran out of memory.
    """

    limit: int | None
    shards: int
    samples: int
    fits: bool
    peak: int | None = None
    tried: dict[int, bool] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    said: str = ""

    @property
    def enough(self) -> int | None:
        """The fewest shards, of those tried, that fit."""
        return next((shards for shards, fits in self.tried.items() if fits), None)

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "limit_bytes": self.limit,
            "shards": self.shards,
            "samples_in_a_shard": self.samples,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "tried": [{"shards": shards, "fits": fits} for shards, fits in self.tried.items()],
            "shards_that_fit": self.enough,
            "changes": list(self.changes),
            "said": self.said,
        }


def examine(
    recipe: Recipe, limit: int | None, look: Callable[[Recipe], Look], tell: Callable[[str], None]
) -> tuple[Memory, Look | None]:
    """Whether the shards fit; if not, twice as many again and again until they do. Nothing is changed.

    A rank that runs out of memory ends its trial for all of them: whoever started them decides.

    Args:
        look: makes some steps of a recipe in ranks of their own.
        tell: hears what is done next.

    Raises:
        RankError: a rank failed for another reason.
    """
    tell(f"memory: a shard of {_largest(recipe)} samples")
    try:
        seen = look(recipe)
    except RankError as error:
        said = _said(error, limit)
    else:
        return Memory(limit, recipe.shards, _largest(recipe), True, seen.peak), seen
    tried: dict[int, bool] = {}
    changes: tuple[str, ...] = ()
    for shards in _more(recipe):
        tell(f"memory: it does not fit; {shards} shards")
        other = replace(recipe, shards=shards)
        try:
            seen = look(other)
        except RankError as error:
            _said(error, limit)
            tried[shards] = False
        else:
            tried[shards], changes = True, _changes(recipe, other, seen)
            break
    return Memory(limit, recipe.shards, _largest(recipe), False, None, tried, changes, said), None


def _more(recipe: Recipe) -> Iterator[int]:
    shards = recipe.shards
    while shards < recipe.batch_size:
        shards = min(2 * shards, recipe.batch_size)
        yield shards


def _changes(before: Recipe, after: Recipe, seen: Look) -> tuple[str, ...]:
    """What becomes other with other shards, besides the last bits."""
    changes = []
    if seen.norms and before.step.batch_norm == "shard":
        changes.append(f"batch norm is over {_largest(after)} samples in place of {_largest(before)}")
    if seen.dropouts:
        changes.append("dropout draws other masks")
    return tuple(changes)


def _said(error: RankError, limit: int | None) -> str:
    """What a rank said that ran out of memory.

    Raises:
        RankError: it failed for another reason.
    """
    failure = error.failure
    # Without a limit of ours, the system kills who takes too much; libraries take a limit each in their own way.
    is_died = failure.by_signal == SIGKILL or (limit is not None and failure.kind is None)
    is_onednn = limit is not None and _ONEDNN.search(failure.text) is not None
    if not (failure.is_of_memory or is_died or is_onednn):
        raise error
    return str(error).splitlines()[0]


def _largest(recipe: Recipe) -> int:
    return -(-recipe.batch_size // recipe.shards)
