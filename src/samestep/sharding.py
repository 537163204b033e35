"""How a global batch is cut into shards and who owns them: integer arithmetic only."""

from __future__ import annotations

from samestep.errors import InputError


def shard_bounds(size: int, shards: int) -> list[tuple[int, int]]:
    """Slices `[start, stop)` of a global batch of `size` samples, one a shard; sizes differ by at most one.

    A batch smaller than `shards` has empty shards, which take no part in the step.
    """
    return [(size * s // shards, size * (s + 1) // shards) for s in range(shards)]


def owned_shards(shards: int, size: int, rank: int) -> range:
    """The shards that rank `rank` of `size` computes: `[V*r//R, V*(r+1)//R)`."""
    return range(shards * rank // size, shards * (rank + 1) // size)


def require_enough_shards(shards: int, processes: int) -> None:
    """Refuse more ranks than there are shards for.

    Raises:
        InputError: a rank would have nothing to do.
    """
    if processes > shards:
        idle = processes - shards
        raise InputError(
            f"{processes} ranks share the data but the recipe has {shards} shards, "
            f"so {idle} rank{'s' if idle > 1 else ''} would have nothing to do.",
            rule="ranks that share the data <= shards",
            do=f"--processes {shards}, or set shards: {processes} "
            "(this changes batch-norm groups and dropout, so results change)",
        )
