"""Tests of the plain values on which a verdict depends."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from samestep.view.switches import Outside, code_of, switch

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
