"""Tests of the recorded phases and collectives of a step."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from helpers.models import Perceptron, seeded
from samestep.config import RunOptions
from samestep.distributed.world import World
from samestep.tools.profile import Plan
from samestep.tools.profile_worker import StepRecorder


@pytest.fixture
def recorder(alone: World) -> Iterator[StepRecorder]:
    plan = Plan(warmup=0, active=9, traced=0, folder=Path(), options=RunOptions())
    recorder = StepRecorder(plan)
    yield recorder
    recorder.close()


def train(steps: int, collective: Callable[[], object] | None = None) -> torch.nn.Module:
    """Train a model on random data; with a collective between forward and backward, as of code that logs."""
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(12, next(model.parameters()).shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if collective is not None:
            collective()
        loss.backward()
        optimizer.step()
    return model


def test_phases_of_a_step_are_recorded(alone: World, recorder: StepRecorder) -> None:
    recorder.begin(alone)
    train(1)
    phases = recorder.phases()
    assert all(phases[phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))
    assert phases["communication"] == 0


def test_collectives_of_samestep_are_communication(alone: World, recorder: StepRecorder) -> None:
    recorder.begin(alone)
    train(1, collective=alone.barrier)
    assert recorder.phases()["communication"] > 0
    backward = torch.autograd.backward
    recorder.close()
    assert torch.autograd.backward is not backward
    assert alone.session.status.on_wait is None


def test_recording_does_not_change_weights(alone: World, recorder: StepRecorder) -> None:
    def weights() -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in train(3).parameters()]

    expected = weights()
    recorder.begin(alone)
    assert weights() == expected
