"""What user code asks of `torch.distributed`, heard before it is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

# Each with the argument whose type all ranks share, and whether its number of elements must be the same too: some
# backends gather and scatter parts of different sizes. Messages between two ranks are missing on purpose: what a rank
# sends and receives is its own.
_HEARD: dict[str, tuple[str | None, bool]] = {
    "all_gather": ("tensor", False),
    "all_gather_coalesced": (None, False),
    "all_gather_into_tensor": ("input_tensor", True),
    "all_gather_object": (None, False),
    "all_gather_single": ("input_tensor", True),
    "all_reduce": ("tensor", True),
    "all_reduce_coalesced": (None, False),
    "all_to_all": (None, False),
    "all_to_all_single": ("output", False),
    "barrier": (None, False),
    "broadcast": ("tensor", True),
    "broadcast_object_list": (None, False),
    "gather": ("tensor", False),
    "gather_object": (None, False),
    "monitored_barrier": (None, False),
    "new_group": (None, False),
    "new_subgroups": (None, False),
    "new_subgroups_by_enumeration": (None, False),
    "reduce": ("tensor", True),
    "reduce_scatter": ("output", False),
    "reduce_scatter_single": ("output", True),
    "reduce_scatter_tensor": ("output", True),
    "scatter": ("tensor", False),
    "scatter_object_list": (None, False),
}

Hear = Callable[[str, bool], Callable[[], None] | None]


def hear_collectives(listens: Callable[[], bool], hear: Hear) -> Callable[[], None]:
    """Call `hear(what, waits)` before each collective of all ranks that is issued by its name in `torch.distributed`.

    Only where `listens()` is true at that moment: it is asked first, since a step's own communication comes here too.

    `waits` is whether the caller waits for the end of it (`async_op` is not set). What `hear` returns, if it is a
    function, is called when the collective has returned. Collectives of a subgroup are not
    heard: other ranks have no part in them. Neither is what torch's own C++ code, or a name that was imported
    beforehand (`from torch.distributed import all_reduce`), does.

    Returns:
        What ends it.
    """
    before = {name: getattr(dist, name) for name in _HEARD if hasattr(dist, name)}  # some are new, others deprecated
    for name, function in before.items():
        setattr(dist, name, _heard(name, function, listens, hear))

    def restore() -> None:
        for name, function in before.items():
            setattr(dist, name, function)

    return restore


def _heard(name: str, function: Callable[..., Any], listens: Callable[[], bool], hear: Hear) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def heard(*arguments: Any, **named: Any) -> Any:
        if not listens():
            return function(*arguments, **named)
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:
            return function(*arguments, **named)  # which says what is wrong
        end = None
        if _is_for_all(name, bound.arguments):
            end = hear(_described(name, bound.arguments), not bound.arguments.get("async_op", False))
        try:
            return function(*arguments, **named)
        finally:
            if end is not None:
                end()

    return heard


def _is_for_all(name: str, given: Mapping[str, Any]) -> bool:
    if name == "new_group":
        return not given.get("use_local_synchronization", False)
    return given.get("group") in (None, dist.group.WORLD)


def _described(name: str, given: Mapping[str, Any]) -> str:
    """`all_reduce (sum) of 3 float32`: what must be the same on every rank."""
    argument, is_even = _HEARD[name]
    text = name
    if "reduce" in name:
        text += f" ({_operation(given.get('op', dist.ReduceOp.SUM))})"
    tensor = given.get(argument) if argument is not None else None
    if isinstance(tensor, torch.Tensor):
        count = f"{tensor.numel()} " if is_even else ""
        text += f" of {count}{str(tensor.dtype).removeprefix('torch.')}"
    if name.startswith(("broadcast", "scatter")):
        text += f" from rank {_root(given, 'src', 'group_src')}"
    if name in ("reduce", "gather", "gather_object"):
        text += f" to rank {_root(given, 'dst', 'group_dst')}"
    return text


def _operation(operation: Any) -> str:
    return str(getattr(operation, "op", operation)).rpartition(".")[2].lower()


def _root(given: Mapping[str, Any], *names: str) -> int:
    return next((given[name] for name in names if given.get(name) is not None), 0)
