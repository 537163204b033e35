"""What ranks run for `unit/runtime/test_gather.py`."""

from typing import Any

import samestep
from samestep.errors import InputError

# What rank 0, 1 and 2 give, from short to long.
GIVEN: dict[str, list[Any]] = {
    "numbers": [0, -(2**70), 0.1 + 0.2],
    "nothing": [None, None, None],
    "empty": ["", [], {}],
    "text": ["", "ein Fuß 中文 \U0001f98a \x00", "a" * 100_000],
    "lists and mappings": [[], {"a": [1, {"b": None}]}, [[True], "x", 1e-300]],
}
COUNTS = [3.0, 0.0, 5.0]


def run_all() -> dict[str, list[Any]]:
    """What every rank has got, by rank, of everything that they tell each other."""
    with samestep.start(device="cpu") as world:
        got: dict[str, Any] = {name: samestep.all_gather(values[world.rank], world) for name, values in GIVEN.items()}
        values = {"b": 0.1 * (world.rank + 1), "a": float("nan") if world.rank == 1 else 2.0**world.rank}
        got["means"] = samestep.reduce_dict(values, world, count=COUNTS[world.rank])
        got["plain means"] = samestep.reduce_dict({"rank": world.rank}, world)
        got["no values"] = samestep.reduce_dict({}, world)
        got["refused"] = refused(world)
        everybody = samestep.all_gather(got, world)
        return {name: [rank[name] for rank in everybody] for name in got}


def refused(world: samestep.World) -> list[str]:
    """What `reduce_dict` refuses, on every rank alike."""
    told = []
    for values, count in (({f"rank {world.rank}": 1.0}, 1.0), ({"a": 1.0}, 0.0)):
        try:
            samestep.reduce_dict(values, world, count=count)
        except InputError as error:
            told.append(error.value)
    return told


def give_a_set() -> None:
    """Only rank 1 does; the others wait for it."""
    with samestep.start(device="cpu") as world:
        samestep.all_gather({1} if world.rank == 1 else 0, world)
