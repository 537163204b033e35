"""Notes of recipes on GPUs, from numbers in place of a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from samestep.config import RecipeStep
from samestep.distributed.devices import GpuMemory
from samestep.distributed.world import World
from samestep.recipes import events
from samestep.recipes.events import memory_event
from samestep.recipes.run import gpu_hints

CONVOLUTIONS = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))


def test_hints_are_for_gpus_and_for_options_that_are_not_set() -> None:
    gpu = torch.device("cuda", 0)
    step = RecipeStep()
    assert gpu_hints(CONVOLUTIONS, step, torch.device("cpu")) == []
    hints = gpu_hints(CONVOLUTIONS, step, gpu)
    assert [option in hint for option, hint in zip(("bf16", "channels_last"), hints, strict=True)] == [True, True]
    assert gpu_hints(nn.Linear(2, 2), step, gpu) == hints[:1]
    assert gpu_hints(CONVOLUTIONS, replace(step, precision="fp16"), gpu) == hints[1:]
    assert gpu_hints(CONVOLUTIONS, replace(step, precision="bf16", channels_last=True), gpu) == []


def test_memory_of_an_epoch(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_event(alone) is None  # without GPUs
    unit = 2**30
    memory = GpuMemory(allocated=unit, peak=6 * unit, reserved=8 * unit, free=70 * unit, total=80 * unit)
    monkeypatch.setattr(events, "gpu_memory", lambda: memory)
    event = memory_event(alone)
    assert event is not None
    assert "6 GiB and 2 GiB for connections, of 80 GiB" in event.pop("text")
    assert event == {"peak_bytes": 6 * unit, "other_bytes": 2 * unit, "total_bytes": 80 * unit}
