"""State that a call changes: found changes, and restored values."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from samestep.view.kinds import submodules
from samestep.view.snapshot import Snapshot, Written

CPU = torch.device("cpu")


class Counting(nn.Module):
    """A module with parts that can be told to write into their state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.part = nn.Module()
        self.part.register_buffer("table", torch.arange(3.0))
        self.part.register_buffer("empty", None)
        self.part.number = 1
        self.part.items = [1, 2]
        self.part.names = {"a": 1}
        self.part.seen = {1}
        self.part.rate = 0.5


PART = 2  # index of `part` among the submodules


def written(write: Callable[[Any], Any]) -> Written:
    module = Counting()
    before = Snapshot(submodules(module), None, CPU)
    write(module)
    return before.changes()


def _append(module: Counting) -> None:
    module.part.items.append(3)


def _same_length(module: Counting) -> None:
    module.part.items[0] = 7


def _delete(module: Counting) -> None:
    del module.part.rate


def _replace_buffer(module: Counting) -> None:
    module.part.table = module.part.table + 0


def _hidden_write(module: Counting) -> None:
    """Write as kernels do that do not count versions."""
    table: Any = module.part.table
    version = table._version
    table.numpy()[1] = 9
    assert table._version == version


BUFFERS: dict[str, tuple[Callable[[Any], Any], list[tuple[int, str]]]] = {
    "batch norm": (
        lambda module: module.norm(torch.randn(5, 3)),
        [(1, "running_mean"), (1, "running_var"), (1, "num_batches_tracked")],
    ),
    "in place": (lambda module: module.part.table.add_(1), [(PART, "table")]),
    "no version": (_hidden_write, [(PART, "table")]),
    "resized": (lambda module: module.part.table.resize_(2, 2).zero_(), [(PART, "table")]),
    "replaced": (_replace_buffer, [(PART, "table")]),
    "removed": (lambda module: module.part._buffers.pop("table"), [(PART, "table")]),
    "evaluation": (lambda module: module.norm.eval()(torch.randn(5, 3)), []),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_written_buffers_are_found(name: str) -> None:
    write, buffers = BUFFERS[name]
    assert {place for place in written(write) if isinstance(place, tuple)} == set(buffers)


ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "number": lambda module: setattr(module.part, "number", 2),
    "new": lambda module: setattr(module.part, "other", 2),
    "deleted": _delete,
    "list": _append,
    "item of a list": _same_length,
    "list replaced by a number": lambda module: setattr(module.part, "items", 3),
    "list replaced by None": lambda module: setattr(module.part, "items", None),
    "key": lambda module: module.part.names.update(b=1),
    "value of a key": lambda module: module.part.names.update(a=2),
    "dictionary replaced by a number": lambda module: setattr(module.part, "names", 3),
    "set": lambda module: module.part.seen.add(2),
    "set emptied": lambda module: module.part.seen.clear(),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_written_attributes_are_found(name: str) -> None:
    assert written(ATTRIBUTES[name]) == {PART}


def test_generators_are_found() -> None:
    assert written(lambda _: random.random()) == {"python"}
    assert written(lambda _: numpy.random.rand()) == {"numpy"}
    assert written(lambda _: numpy.random.normal()) == {"numpy"}
    assert not written(lambda _: torch.rand(3))  # its state is always saved


def test_nothing_written_is_nothing() -> None:
    assert not written(lambda module: module.part.table.sum())


def state(module: Counting) -> dict[str, Any]:
    """Return all that a call could change, by value."""
    found: dict[str, Any] = {}
    for index, part in enumerate(submodules(module)):
        for name, value in part.__dict__.items():
            if name not in ("_parameters", "_modules", "_buffers"):
                found[f"{index}.{name}"] = value.copy() if isinstance(value, list | dict | set) else value
        for name, buffer in part._buffers.items():
            found[f"{index}.{name}"] = None if buffer is None else (id(buffer), buffer.tolist())
    return found


@pytest.mark.parametrize("name", [*BUFFERS, *ATTRIBUTES])
def test_written_state_is_put_back(name: str) -> None:
    write = BUFFERS[name][0] if name in BUFFERS else ATTRIBUTES[name]
    seen = written(write)
    module = Counting()
    before = state(module)
    containers = [module.part.items, module.part.names, module.part.seen]
    snapshot = Snapshot(submodules(module), seen, CPU)
    write(module)
    assert name == "evaluation" or state(module) != before
    snapshot.restore()
    if name != "evaluation":
        assert state(module) == before
    if "replaced" not in name:
        assert module.part.items is containers[0]
        assert module.part.names is containers[1]
        assert module.part.seen is containers[2]


def test_generators_are_put_back() -> None:
    def numbers() -> list[Any]:
        return [random.random(), random.gauss(), numpy.random.rand(), numpy.random.normal(), torch.rand(1).item()]

    snapshot = Snapshot([], frozenset({"python", "numpy"}), CPU)
    before = numbers()
    snapshot.restore()
    assert numbers() == before


def test_a_buffer_that_holds_gradients_is_put_back() -> None:
    module = Counting()
    snapshot = Snapshot(submodules(module), frozenset({(PART, "table")}), CPU)
    weight = torch.ones(3, requires_grad=True)
    module.part.table = weight * 2
    snapshot.restore()
    table: Any = module.part.table
    assert table.tolist() == [0, 1, 2]
    assert not table.requires_grad


def test_lazy_buffers_are_left_out() -> None:
    module = nn.LazyBatchNorm1d()
    before = Snapshot([module], None, CPU)
    module(torch.randn(4, 3))
    assert before.changes() == {0, (0, "num_batches_tracked")}


def test_tensors_of_attributes_are_found() -> None:
    def write(module: Any) -> None:
        module.part.last = torch.ones(3)

    found = written(write)
    assert found == {PART}
    module = Counting()
    snapshot = Snapshot(submodules(module), found, CPU)
    write(module)
    snapshot.restore()
    assert not hasattr(module.part, "last")


def test_a_tensor_in_an_attribute_that_is_written_in_place() -> None:
    module = Counting()
    hidden: Tensor = torch.zeros(3)
    module.part.hidden = [hidden]
    parts = submodules(module)
    before = Snapshot(parts, None, CPU)
    hidden.add_(1)
    found = before.changes()
    assert found == {PART}
    snapshot = Snapshot(parts, found, CPU)
    hidden.add_(1)
    snapshot.restore()
    assert hidden.tolist() == [1, 1, 1]


def test_items_of_nested_containers_that_are_written() -> None:
    module = Counting()
    module.part.hidden = {"calls": {"number": 0}, "sizes": ([1],)}
    parts = submodules(module)
    before = Snapshot(parts, None, CPU)
    module.part.hidden["calls"]["number"] += 1
    found = before.changes()
    assert found == {PART}
    snapshot = Snapshot(parts, found, CPU)
    nested = module.part.hidden["calls"]
    nested["number"] += 1
    module.part.hidden["sizes"][0].append(2)
    snapshot.restore()
    assert module.part.hidden == {"calls": {"number": 1}, "sizes": ([1],)}
    assert module.part.hidden["calls"] is nested


def test_slices_that_take_turns_do_not_see_the_buffers_of_each_other() -> None:
    module = Counting()
    snapshot = Snapshot(submodules(module), frozenset({(PART, "table")}), CPU)
    slices = [snapshot.buffers_of_slice(copied=position > 0) for position in range(3)]
    seen = []
    for _ in range(2):
        for buffers in slices:
            with buffers.installed():
                module.part.table.add_(1)
                seen.append(module.part.table.tolist())
    assert seen == [[1, 2, 3]] * 3 + [[2, 3, 4]] * 3
    slices[1].install()
    assert module.part.table.tolist() == [2, 3, 4]


def test_a_tensor_that_a_graph_needs_may_be_written_by_the_next_slice() -> None:
    module = Counting()
    module.part.hidden = torch.zeros(())
    snapshot = Snapshot(submodules(module), frozenset({PART}), CPU)
    weight = torch.ones((), requires_grad=True)
    outputs = []
    for _ in range(2):
        snapshot.restore()
        module.part.hidden.add_(3)
        outputs.append(weight * module.part.hidden)
    sum(outputs, torch.zeros(())).backward()  # refused if the number of writes differed
    assert weight.grad is not None
    assert weight.grad.item() == 6


@pytest.mark.parametrize("name", [*ATTRIBUTES, "in place", "replaced", "removed"])
def test_a_later_change_of_other_state_is_noticed_and_put_back(name: str) -> None:
    write = BUFFERS[name][0] if name in BUFFERS else ATTRIBUTES[name]
    module = Counting()
    module.part.__class__ = type("Part", (nn.Module,), {})  # of the script
    before = state(module)
    other = Snapshot(submodules(module), frozenset(), CPU)
    assert not other.changes()
    write(module)
    assert other.changes()
    other.restore()
    assert state(module) == before


def test_a_known_change_is_no_other_change() -> None:
    module = Counting()
    known: Written = frozenset({(PART, "table"), PART, "python"})
    other = Snapshot(submodules(module), known, CPU)
    module.part.table.add_(1)
    _append(module)
    random.random()
    assert not other.changes()
    numpy.random.rand()
    assert other.changes()


def test_values_of_written_state_differ_if_the_state_does() -> None:
    def values(write: Callable[[Any], Any]) -> list[Any]:
        module = Counting()
        module.part.__class__ = type("Part", (nn.Module,), {})
        module.part.hidden = torch.zeros(())
        random.seed(4)
        known: Written = frozenset({(PART, "table"), PART, "python"})
        snapshot = Snapshot(submodules(module), known, CPU)
        write(module)
        return snapshot.values()

    writes: list[Callable[[Any], Any]] = [
        lambda module: None,
        lambda module: module.part.items.append(0.5),
        lambda module: module.part.items.append(0.25),
        lambda module: module.part.items.append(torch.ones(2)),
        lambda module: module.part.items.append(torch.zeros(2)),
        lambda module: setattr(module.part, "number", 7),
        lambda module: module.part.table.add_(1),
        lambda module: module.part.hidden.add_(1),
        lambda module: random.random(),
    ]
    texts = [repr(values(write)) for write in writes]
    assert texts == [repr(values(write)) for write in writes]
    assert len(set(texts)) == len(writes)
