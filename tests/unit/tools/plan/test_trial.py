"""Measurements of the links between ranks."""

import pytest
import torch

from samestep.distributed.world import World
from samestep.tools.plan import trial


def test_all_ranks_connect_before_some_of_them_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for all ranks of a group in its first collective."""
    calls: list[str] = []

    def noted(name: str) -> None:
        calls.append(name)

    world = World(2, 3, torch.device("cpu"))
    monkeypatch.setattr(World, "all_reduce", lambda self, tensor: noted(f"all-reduce on {tensor.device}"))
    monkeypatch.setattr(World, "sockets", None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: noted(f"group of {ranks}"))
    monkeypatch.setattr(trial, "_link", lambda *_: trial.Link(1.0, 1.0))
    trial._measure_links(world, [2])
    assert calls == ["all-reduce on cpu", "group of [0, 1]"]
