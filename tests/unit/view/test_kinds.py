"""Kinds of calls: differences between kinds."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from samestep.view.kinds import Kind, Outside, arguments_key, code_of, module_key, operations_hash, submodules, switch
from samestep.view.operations import Operation, Operations
from samestep.view.trial_result import Division


class Configured(nn.Module):
    def __init__(self, configuration: Any) -> None:
        super().__init__()
        self.configuration = configuration


def key(configuration: Any) -> Any:
    return module_key(submodules(Configured(configuration)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"reduction": "mean"}, {"reduction": "sum"}),
        ({"loss": {"reduction": "mean"}}, {"loss": {"reduction": "sum"}}),
        ([True, False], [True, True]),
        (("relu", {"norm": None}), ("relu", {"norm": "batch"})),
    ],
)
def test_switches_inside_containers_make_another_kind(one: Any, other: Any) -> None:
    assert key(one) != key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rate": 0.1}, {"rate": 0.2}),
        ([1.0], [1.0, 2.0]),
        ({f"word{number}": "a" for number in range(100)}, {f"word{number}": "b" for number in range(100)}),
    ],
)
def test_numbers_and_large_containers_make_no_other_kind(one: Any, other: Any) -> None:
    assert key(one) == key(other)


def operations(**options: Any) -> tuple[Operation, ...]:
    with Operations() as found:
        F.l1_loss(torch.ones(3), torch.zeros(3), **options)
    return tuple(found.functions)


def test_switches_of_a_function_make_another_list_of_operations() -> None:
    assert operations(reduction="mean") != operations(reduction="sum")
    assert operations_hash(operations(reduction="mean")) != operations_hash(operations(reduction="sum"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.mean(0), lambda x: x.mean(1)),
        (lambda x: torch.sum(x, dim=(0, 1)), lambda x: torch.sum(x, dim=(1, 2))),
        (lambda x: F.softmax(x, dim=0), lambda x: F.softmax(x, dim=1)),
        (lambda x: 0.0 * x, lambda x: 0.5 * x),
    ],
)
def test_dimensions_and_zeros_make_another_list_of_operations(one: Any, other: Any) -> None:
    lists = []
    for function in (one, other):
        with Operations() as found:
            function(torch.ones(2, 3, 4))
        lists.append(found.functions)
    assert lists[0] != lists[1]


def test_numbers_of_rows_make_no_other_list_of_operations() -> None:
    lists = []
    for rows in (2, 3):
        with Operations() as found:
            x = torch.ones(rows, 4)
            (x.view(rows, 2, 2) + x.new_zeros(rows, 1, 1).expand(rows, 2, 2)).narrow(0, 0, rows).mul(0.5)
        lists.append(found.functions)
    assert lists[0] == lists[1]


def test_name_of_a_device_makes_no_other_list_of_operations() -> None:
    with Operations() as one:
        torch.ones(1).to("meta:0")
    with Operations() as other:
        torch.ones(1).to("meta:1")
    assert one.functions == other.functions


def test_a_trial_holds_for_the_list_of_operations_of_its_call() -> None:
    division = Division((True,), (), operations=(torch.relu,))
    kind = Kind(division=division, last=(torch.Tensor.float, torch.relu))
    assert kind.divides((torch.relu,))
    assert kind.divides((torch.Tensor.float, torch.relu))
    assert not kind.divides((torch.tanh,))
    kind.last = (torch.tanh,)  # watched, but the trial took another branch
    assert not kind.divides((torch.tanh,))
    kind.division = None
    assert not kind.divides((torch.relu,))


def test_an_earlier_list_is_divided_while_its_division_is_that_of_the_kind() -> None:
    kind = Kind(division=Division((True,), (), operations_per_row=2.0))
    kind.known[torch.relu,] = Division((True,), (), operations_per_row=1.0)
    kind.known[torch.tanh,] = Division((True,), (), minimum_rows=2)
    assert kind.divides((torch.relu,))
    assert not kind.divides((torch.tanh,))


def test_values_of_many_rows_make_no_other_kind() -> None:
    assert arguments_key([3, 4] * 8, 4) == arguments_key([5, 6] * 8, 4)
    assert arguments_key([f"image {row}" for row in range(9)], 9) == arguments_key(["image"] * 9, 9)
    assert arguments_key([1, "mean"], 4) != arguments_key([2, "mean"], 4)
    assert arguments_key([1, "mean"], 4) != arguments_key([1, "sum"], 4)


WEIGHT = 0.0
OPTIONS = argparse.Namespace(weight=0.0, epochs=1)


class Net(nn.Module):
    factor = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.term(x) + self.factor * x.mean(0)

    def term(self, x: torch.Tensor) -> torch.Tensor:
        return x * OPTIONS.weight + WEIGHT * x.mean(0)


def centre(dim: int):
    return lambda x: x - x.mean(dim)


def test_only_small_numbers_count() -> None:
    assert switch(0.5) == switch(0.25)
    assert switch(0.0) != switch(0.25)
    assert switch(0.5, exact=True) != switch(0.25, exact=True)


def test_containers_of_settings_count() -> None:
    assert switch((1,)) != switch((0,))
    assert switch({"a": {"b": 0.0}}) != switch({"a": {"b": 0.1}})
    assert switch([1, 2], exact=True) != switch([1, 3], exact=True)
    assert switch([5]) == switch([5, 6])  # a list that grows with the steps


def test_closures_and_partial_arguments_count() -> None:
    assert code_of(centre(1)) == code_of(centre(1))
    assert code_of(centre(1)) != code_of(centre(0))
    assert code_of(partial(torch.mean, dim=(1,))) != code_of(partial(torch.mean, dim=(0,)))


def test_globals_settings_and_class_variables_count(monkeypatch) -> None:
    outside = Outside([Net()])
    before = outside.key()
    assert outside.key() == before
    monkeypatch.setattr(OPTIONS, "epochs", 0)  # not named by the forward
    assert outside.key() == before
    for owner, name in ((OPTIONS, "weight"), (Net, "factor")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, 0.1)
            assert outside.key() != before
    monkeypatch.setitem(globals(), "WEIGHT", 0.1)
    assert outside.key() != before
