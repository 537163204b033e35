"""Small things that ranks tell each other: numbers and JSON, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from samestep.errors import InputError
from samestep.runtime.world import World


def all_gather(value: Any, world: World) -> list[Any]:
    """What every rank gives, by rank, on every rank; all of them call it.

    Args:
        value: what JSON can say: numbers, text, booleans, None, and lists and mappings (by text) of these. Tuples
            arrive as lists.

    Raises:
        InputError: it is something else.
        PeerLostError: another rank went away.
    """
    try:
        said = json.dumps(value).encode()
        _require_text_keys(value)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"all_gather was given what JSON cannot say: {error}",
            rule="numbers, text, booleans, None, lists and mappings by text; tensors as lists: tensor.tolist()",
            do="send something smaller and simpler, pairs instead of a mapping by number, or use torch.distributed "
            "for tensors",
        ) from error
    lengths = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    lengths[world.rank] = len(said)
    world.all_reduce(lengths)
    longest = int(lengths.max())
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    own = own.to(world.device)
    found = [torch.empty_like(own) for _ in range(world.size)]
    world.guarded(lambda: dist.all_gather(found, own, group=world.group), "an all-gather")
    texts = [bytes(each[:length].cpu().numpy()) for each, length in zip(found, lengths.tolist(), strict=True)]
    return [json.loads(text) for text in texts]


def reduce_dict(values: Mapping[str, float], world: World, *, count: float = 1.0) -> dict[str, float]:
    """The mean of each value over ranks, weighted by what each rank has counted; all of them call it and get it.

    With `count` the number of samples behind a rank's values, the result is the mean over all samples, however uneven
    ranks are: not a mean of means. The result has the same bits on every rank.

    Args:
        values: the same names on every rank.
        count: what this rank's values are means over; 0 for a rank that has nothing.

    Raises:
        InputError: ranks have different names, or nothing was counted at all.
    """
    said = all_gather([sorted(values), [values[name] for name in sorted(values)], count], world)
    names = said[0][0]
    for rank, (others, _, _) in enumerate(said):
        if others != names:
            raise InputError(
                f"reduce_dict: rank {rank} has the names {', '.join(others)}, rank 0 has {', '.join(names)}",
                rule="every rank gives the same names",
                do="give 0 with count=0 where a rank has nothing",
            )
    total = sum(count for _, _, count in said)
    if not total > 0:
        raise InputError(
            "reduce_dict: no rank has counted anything", rule="a mean is over something", do="count=1 for plain means"
        )
    sums = [sum(numbers[place] * count for _, numbers, count in said if count) for place in range(len(names))]
    return {name: value / total for name, value in zip(names, sums, strict=True)}


def _require_text_keys(value: Any) -> None:
    """Refuse mappings by anything but text: JSON would turn the key 1 into the key "1" without a word."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a mapping with the key {key!r}")
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _require_text_keys(each)
