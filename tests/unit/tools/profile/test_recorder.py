"""Tests of the recorded phases and collectives of a step."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import samestep
from helpers.batches import random_batch
from helpers.models import Perceptron, seeded
from helpers.simulated_accelerator import simulated_accelerator
from samestep import Loss
from samestep.tools.profile.recorder import StepRecorder


def loss_with_collective(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Return the cross entropy after an all-reduce, as code that logs it would."""
    total = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    dist.all_reduce(total.detach().clone())
    return Loss(total, len(targets))


def make_engine(
    world: samestep.World, *recorders: StepRecorder, loss: object = samestep.cross_entropy
) -> samestep.Engine:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, loss, world=world, callbacks=recorders)
    for recorder in recorders:
        recorder.bind(engine)
    return engine


@pytest.fixture
def recorder() -> Iterator[StepRecorder]:
    recorder = StepRecorder()
    yield recorder
    recorder.close()


def record(world: samestep.World, engine: samestep.Engine, recorder: StepRecorder) -> None:
    recorder.begin()
    engine.step(random_batch(world, 12, 3))
    recorder.end()


def test_phases_of_a_step_are_recorded(alone: samestep.World, recorder: StepRecorder) -> None:
    engine = make_engine(alone, recorder)
    recorder.is_on = True
    record(alone, engine, recorder)
    phases = recorder.phases()
    assert all(phases[phase] > 0 for phase in ("data", "forward", "backward", "optimizer", "other"))
    assert phases["computing"] == 0


def test_records_do_not_wait_for_an_accelerator(alone: samestep.World, recorder: StepRecorder) -> None:
    engine = make_engine(alone)
    with simulated_accelerator() as accelerator:
        recorder.bind(engine)
        recorder.is_on = True
        accelerator.counts.clear()
        for _ in range(2):
            recorder.begin()
            recorder.end_gradients(engine)
            recorder.end()
        assert accelerator.counts["synchronize"] == 0
        assert recorder.phases()["optimizer"] > 0


def test_collectives_of_user_code_are_communication(alone: samestep.World, recorder: StepRecorder) -> None:
    engine = make_engine(alone, recorder, loss=loss_with_collective)
    recorder.is_on = True
    record(alone, engine, recorder)
    assert recorder.phases()["communication"] > 0
    recorder.close()
    assert dist.all_reduce.__module__.startswith("torch")
    assert alone.context.status.on_wait is None


def test_recording_does_not_change_weights(alone: samestep.World, recorder: StepRecorder) -> None:
    def weights(*recorders: StepRecorder) -> list[bytes]:
        engine = make_engine(alone, *recorders)
        for seed in range(3):
            engine.step(random_batch(alone, 12, 3, seed=seed))
        return [parameter.detach().numpy().tobytes() for parameter in engine.model.parameters()]

    recorder.is_on = True
    assert weights(recorder) == weights()
