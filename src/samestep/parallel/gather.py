"""What every rank says, on every rank: a few numbers or a text of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.runtime.world import World


def gather_numbers(world: World, mine: Sequence[int]) -> list[tuple[int, ...]]:
    """The integers (of 64 bits with sign, as many on each rank) that every rank gives, by rank."""
    rows = torch.zeros(world.size, len(mine), dtype=torch.int64, device=world.device)
    rows[world.rank] = torch.tensor(mine, dtype=torch.int64)
    world.all_reduce(rows)  # every place has one summand that is not zero
    return [tuple(row) for row in rows.tolist()]


def gather_texts(world: World, mine: bytes) -> list[bytes]:
    """The bytes that every rank gives, by rank."""
    lengths = [length for (length,) in gather_numbers(world, [len(mine)])]
    rows = torch.zeros(world.size, max(lengths), dtype=torch.uint8, device=world.device)
    rows[world.rank, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    world.all_reduce(rows)
    return [bytes(row[:length]) for row, length in zip(rows.tolist(), lengths, strict=True)]
