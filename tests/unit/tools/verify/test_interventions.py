"""Changes that experiments of `verify` make in a process."""

import os
from pathlib import Path

import pytest

from samestep.tools.verify.interventions import _reorder_directories


def test_listings_in_another_order_take_usual_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    for function in ("listdir", "scandir"):
        monkeypatch.setattr(os, function, getattr(os, function))  # restored at the end
    _reorder_directories(1)
    assert os.listdir(path=tmp_path) == ["b", "a", "c"]
    assert os.listdir(str(tmp_path)) == os.listdir(tmp_path)
    with os.scandir(path=tmp_path) as entries:
        assert sorted(entry.name for entry in entries) == ["a", "b", "c"]
    monkeypatch.chdir(tmp_path)
    assert sorted(os.listdir()) == ["a", "b", "c"]
