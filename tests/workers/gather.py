"""Functions run in ranks by `unit/distributed/test_world.py`."""

from typing import Any

import torch

import samestep
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.session import start

# Values of rank 0, 1 and 2, from short to long.
VALUES: dict[str, list[Any]] = {
    "numbers": [0, -(2**70), 0.1 + 0.2],
    "nothing": [None, None, None],
    "empty": ["", [], {}],
    "text": ["", "ein Fuß 中文 \U0001f98a \x00", "a" * 100_000],
    "lists and mappings": [[], {"a": [1, {"b": None}]}, [[True], "x", 1e-300]],
}
COUNTS = [3.0, 0.0, 5.0]


def run_all() -> dict[str, list[Any]]:
    """Return the results of every rank, by name and rank."""
    with start(device="cpu") as world:
        results: dict[str, Any] = {
            name: samestep.all_gather(values[world.rank], world) for name, values in VALUES.items()
        }
        values = {"b": 0.1 * (world.rank + 1), "a": float("nan") if world.rank == 1 else 2.0**world.rank}
        results["means"] = samestep.reduce_dict(values, world, count=COUNTS[world.rank])
        results["plain means"] = samestep.reduce_dict({"rank": world.rank}, world)
        results["no values"] = samestep.reduce_dict({}, world)
        results["rejected"] = rejected(world)
        results["tensors"] = gathered_tensors(world)
        all_results = samestep.all_gather(results, world)
        return {name: [row[name] for row in all_results] for name in results}


def gathered_tensors(world: World) -> dict[str, Any]:
    """Return gathered, averaged and summed tensors as lists."""
    kinds = (torch.float32, torch.bfloat16, torch.int64)
    own = torch.arange(2 * world.rank, dtype=kinds[world.rank], requires_grad=world.rank < 2).reshape(world.rank, 2)
    received = samestep.all_gather(own, world)
    assert [(tensor.dtype, tensor.requires_grad) for tensor in received] == [(kind, False) for kind in kinds]
    scores = {"scores": torch.tensor([1.0, float(world.rank)]), "total": torch.tensor(float(world.rank))}
    return {
        "received": [tensor.tolist() for tensor in received],
        "mean": {n: t.tolist() for n, t in samestep.reduce_dict(scores, world, count=COUNTS[world.rank]).items()},
        "sum": {n: t.tolist() for n, t in samestep.reduce_dict(scores, world, reduce="sum").items()},
        "numbers": samestep.reduce_dict({"correct": 10 * world.rank}, world, reduce="sum"),
    }


def rejected(world: World) -> list[str]:
    """Return the messages of rejected calls of `reduce_dict`."""
    messages = []
    cases: list[tuple[dict[str, Any], float]] = [
        ({f"rank {world.rank}": 1.0}, 1.0),
        ({"a": 1.0}, 0.0),
        ({"a": torch.zeros(1 + world.rank)}, 1.0),
    ]
    for values, count in cases:
        try:
            samestep.reduce_dict(values, world, count=count)
        except InputError as error:
            messages.append(f"{error.value} [{error.code}]")
    return messages


def gather_a_set() -> None:
    """Gather an invalid value on rank 1 only, while the others wait."""
    with start(device="cpu") as world:
        samestep.all_gather({1} if world.rank == 1 else 0, world)
