"""Objects that reads can reach, and changes of what they hold."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from samestep.data.read_state import ReadState, objects_of

CALLS = {"count": 0}


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Holder:
    made: list[int] = []  # noqa: RUF012  # shared by all objects

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[Any] = [[1], {2: 3}, {4}, deque([torch.zeros(1)]), torch.zeros(3), numpy.zeros(3)]
        self.large = numpy.zeros(2**17)
        self.slotted = Slotted()
        self.transform = functools.partial(transform, self)

    def read(self) -> int:
        return CALLS["count"]


def transform(holder: Holder) -> int:
    return holder.count


def _call(holder: Holder) -> None:
    transform.calls = 3  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "attribute": lambda holder: setattr(holder, "count", 3),
    "new attribute": lambda holder: setattr(holder, "other", 3),
    "slot": lambda holder: setattr(holder.slotted, "count", 3),
    "list": lambda holder: holder.parts[0].append(2),
    "dict": lambda holder: holder.parts[1].update({2: 4}),
    "set": lambda holder: holder.parts[2].add(5),
    "deque": lambda holder: holder.parts[3].append(torch.ones(1)),
    "tensor": lambda holder: holder.parts[4].add_(1),
    "array": lambda holder: holder.parts[5].fill(1),
    "large array": lambda holder: holder.large.fill(1),
    "class": lambda holder: Holder.made.append(1),
    "global": lambda holder: CALLS.update(count=CALLS["count"] + 1),
    "attribute of a function": _call,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_found(change: str) -> None:
    holder = Holder()
    begin = ReadState([holder])
    assert not begin.differs(ReadState(holder))
    CHANGES[change](holder)
    assert begin.differs(ReadState(holder))
    assert ReadState(holder).differs(begin)


def test_objects_are_found_once_each() -> None:
    holder = Holder()
    found = list(objects_of(holder, holder))
    assert len(set(map(id, found))) == len(found)
    assert any(one is CALLS for one in found)
