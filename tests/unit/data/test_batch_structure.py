"""How batches are put together from parts, and packed into bytes."""

from collections import UserDict, namedtuple
from typing import Any

import numpy
import pytest
import torch

from samestep.data.batch_structure import (
    Leaf,
    OtherStructure,
    content_of,
    equal,
    leaves_of,
    pack,
    plan_of,
    rebuilt,
    shapes_of,
    unpack,
)

Pair = namedtuple("Pair", ["x", "y"])
ROWS, LIST, SAME = Leaf("rows"), Leaf("list"), Leaf("same")


def batch(start: int, stop: int) -> dict[str, Any]:
    count = stop - start
    return {
        "x": torch.arange(start, stop).float()[:, None].expand(count, 3).clone(),
        "crops": torch.arange(2 * start, 2 * stop),
        "names": [f"n{number}" for number in range(start, stop)],
        "pair": Pair(torch.arange(start, stop) > 1, [torch.ones(count, 2, dtype=torch.complex64), "same"]),
        "table": torch.arange(4.0),
        "rate": float("nan"),
    }


PLAN = {"x": ROWS, "crops": Leaf("rows", 2), "names": LIST, "pair": [ROWS, [ROWS, SAME]], "table": SAME, "rate": SAME}


def test_plan_of_nested_data() -> None:
    assert plan_of(batch(0, 4), [batch(0, 1), batch(1, 4)], [1, 3]) == PLAN
    custom = [UserDict(batch(*bounds)) for bounds in ((0, 4), (0, 1), (1, 4))]
    assert plan_of(custom[0], custom[1:], [1, 3]) == PLAN


@pytest.mark.parametrize(
    ("whole", "parts"),
    [
        (torch.zeros(4, 3), [torch.zeros(1, 3), torch.zeros(3, 2)]),  # padded
        (torch.arange(4).flip(0), [torch.arange(1), torch.arange(1, 4)]),  # mixed
        (torch.zeros(3, 4), [torch.zeros(3, 1), torch.zeros(3, 3)]),  # samples in the second dimension
        ({"a": torch.zeros(4)}, [{"a": torch.zeros(1)}, {"b": torch.zeros(3)}]),
        (4, [1, 3]),
        ([torch.zeros(2)] * 4, [[torch.zeros(2)], [torch.zeros(2)] * 3]),  # of various shapes in other batches
        (torch.zeros(4, requires_grad=True), [torch.zeros(1), torch.zeros(3)]),
        (torch.zeros(4).to_sparse(), [torch.zeros(1).to_sparse(), torch.zeros(3).to_sparse()]),
    ],
)
def test_no_plan_for_samples_that_are_not_apart(whole: Any, parts: list[Any]) -> None:
    assert plan_of(whole, parts, [1, 3]) is None


def test_packed_parts_are_the_whole() -> None:
    parts = [leaves_of(batch(*bounds), PLAN) for bounds in ((0, 1), (1, 4))]
    order = [0, 1, 3, 4, 2]  # tensors, then lists
    packed = []
    for leaves in parts:
        packed.append(pack([leaves[number] for number in order]))
    wholes = unpack(packed, [1, 3], [parts[0][number] for number in order])
    expected = leaves_of(batch(0, 4), PLAN)
    assert equal(wholes, [expected[number][1] for number in order])


def test_leaves_are_replaced_in_containers_of_the_same_types() -> None:
    result = rebuilt(UserDict(batch(0, 2)), PLAN, lambda value, leaf: leaf.kind)
    assert type(result) is UserDict
    assert result["pair"] == Pair("rows", ["rows", "same"])
    with pytest.raises(OtherStructure):
        rebuilt({"x": 1}, PLAN, lambda value, leaf: value)
    with pytest.raises(OtherStructure):
        rebuilt([1], [ROWS, ROWS], lambda value, leaf: value)


def test_hash_of_shapes_holds_for_other_rows_and_not_for_other_widths() -> None:
    hashes = [shapes_of(leaves_of(batch(*bounds), PLAN), bounds[1] - bounds[0]) for bounds in ((0, 2), (2, 5))]
    assert hashes[0] == hashes[1]
    wider = batch(0, 2) | {"x": torch.zeros(2, 4)}
    assert shapes_of(leaves_of(wider, PLAN), 2) != hashes[0]
    halves = batch(0, 2) | {"x": torch.zeros(2, 3).half()}
    assert shapes_of(leaves_of(halves, PLAN), 2) != hashes[0]
    other = batch(0, 2) | {"table": torch.zeros(4)}
    assert shapes_of(leaves_of(other, PLAN), 2) != hashes[0]
    for name, value in (("x", torch.zeros(3, 3)), ("x", "text"), ("names", ["a"]), ("names", [object(), object()])):
        with pytest.raises(OtherStructure):
            shapes_of(leaves_of(batch(0, 2) | {name: value}, PLAN), 2)


class Thing:
    def __init__(self, number: float) -> None:
        self.number = number


def test_equality_and_hash_of_contents() -> None:
    equals = [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        (numpy.array([1.0, float("nan")]), numpy.array([1.0, float("nan")])),
        (numpy.array(["a"]), numpy.array(["a"])),
        ({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}),
        (Thing(2), Thing(2)),
    ]
    for one, other in equals:
        assert equal(one, other)
        assert content_of(one) == content_of(other)
    differ = [
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), torch.zeros(1, 2)),
        (numpy.zeros(2), numpy.ones(2)),
        ({"a": 1}, {"b": 1}),
        ([1, 2], (1, 2)),
        ("a\ud800", "b\ud800"),
    ]
    for one, other in differ:
        assert not equal(one, other)
        assert content_of(one) != content_of(other)
    assert not equal(Thing(2), Thing(3))
