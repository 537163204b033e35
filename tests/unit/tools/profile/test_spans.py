"""Tests of the recorded phases and collectives of a step."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import samestep
from helpers.batches import random_batch
from helpers.models import Perceptron, seeded
from helpers.simulated_accelerator import simulated_accelerator
from helpers.waits import Waits
from samestep import Loss
from samestep.config import StepConfig
from samestep.tools.profile.recorder import SpanRecorder


def loss_with_collective(outputs: torch.Tensor, targets: torch.Tensor) -> Loss:
    """Return the cross entropy after an all-reduce, as code that logs it would."""
    total = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    dist.all_reduce(total.detach().clone())
    return Loss(total, len(targets))


def make_engine(
    world: samestep.World, *recorders: SpanRecorder, loss: object = samestep.cross_entropy
) -> samestep.Engine:
    model = seeded(0, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return samestep.Engine(model, optimizer, loss, world=world, callbacks=recorders)


@pytest.fixture
def recorder(alone: samestep.World) -> SpanRecorder:
    return SpanRecorder(alone)


def test_segments_are_ordered_and_without_gaps(alone: samestep.World, recorder: SpanRecorder) -> None:
    engine = make_engine(alone, recorder)
    recorder.is_on = True
    with recorder.step(7):
        recorder.enter("data")
        batch = random_batch(alone, 12, 3)
        recorder.enter("other")
        engine.step(batch)
    [step] = recorder.take_steps()
    assert (step.number, step.microbatches) == (7, 3)
    assert [segment.phase for segment in step.segments] == [
        *("data", "other", "other"),
        *("forward", "backward") * 3,
        *("optimizer", "other"),
    ]
    assert all(before.end == after.begin for before, after in pairwise(step.segments))
    assert all(0 <= segment.cpu <= 1.1 * (segment.end - segment.begin) + 1e-3 for segment in step.segments)


@pytest.mark.parametrize("config", [StepConfig(), StepConfig(batch_norm="sync")], ids=["plain", "sync"])
def test_waits_of_the_engine_are_known(alone: samestep.World, recorder: SpanRecorder, config: StepConfig) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=alone, config=config, callbacks=[recorder])
    batch = random_batch(alone, 12, 3)
    for _ in range(2):
        engine.step(batch)
    with Waits() as waits:
        engine.step(batch)
    assert recorder.engine_waits == sum(waits.calls.values())


def test_records_do_not_wait_for_an_accelerator(alone: samestep.World) -> None:
    with simulated_accelerator() as accelerator:
        recorder = SpanRecorder(alone)
        recorder.is_on = True
        accelerator.counts.clear()
        for number in range(2):
            with recorder.step(number):
                recorder.enter("data")
                recorder.enter("optimizer")
        assert accelerator.counts["synchronize"] == 0
        steps = recorder.take_steps()
    assert [[segment.phase for segment in step.segments] for step in steps] == [["data", "optimizer"]] * 2
    assert 0 < steps[0].seconds < steps[1].begin - steps[0].begin + 1


def test_recorder_that_is_off_records_nothing(alone: samestep.World, recorder: SpanRecorder) -> None:
    engine = make_engine(alone, recorder, loss=loss_with_collective)
    with recorder.recording_collectives(), recorder.step(1):
        recorder.enter("data")
        engine.step(random_batch(alone, 12, 3))
    assert recorder.take_steps() == []


def test_collectives_of_user_code_are_recorded_with_their_line(alone: samestep.World, recorder: SpanRecorder) -> None:
    engine = make_engine(alone, recorder, loss=loss_with_collective)
    engine.step(random_batch(alone, 12, 3))  # the first step sends its statistics after the backward
    recorder.is_on = True
    with recorder.recording_collectives():
        with recorder.step(1):
            recorder.enter("data")
            engine.step(random_batch(alone, 12, 3))
        alone.barrier()
    [step] = recorder.take_steps()
    sites = [collective.site for collective in step.collectives if collective.site is not None]
    assert len(sites) == 3
    assert all("test_spans.py:" in site for site in sites)
    forwards = [(segment.begin, segment.end) for segment in step.segments if segment.phase == "forward"]
    for collective in step.collectives:
        assert any(begin <= collective.begin <= collective.end <= end for begin, end in forwards)
    assert dist.all_reduce.__module__.startswith("torch")
    assert alone.context.status.on_wait is None


def test_recording_does_not_change_weights(alone: samestep.World, recorder: SpanRecorder) -> None:
    def weights(*recorders: SpanRecorder) -> list[bytes]:
        engine = make_engine(alone, *recorders)
        for seed in range(3):
            engine.step(random_batch(alone, 12, 3, seed=seed))
        return [parameter.detach().numpy().tobytes() for parameter in engine.model.parameters()]

    recorder.is_on = True
    assert weights(recorder) == weights()
