"""Tests of the recorded phases and collectives of a step."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import samestep
from helpers.batches import random_batch
from helpers.models import Perceptron, seeded
from samestep import Loss
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
    [step] = recorder.steps
    assert (step.number, step.microbatches) == (7, 3)
    assert [segment.phase for segment in step.segments] == [
        *("data", "other", "other"),
        *("forward", "backward") * 3,
        *("optimizer", "other"),
    ]
    assert all(before.end == after.begin for before, after in pairwise(step.segments))
    assert all(0 <= segment.cpu <= 1.1 * (segment.end - segment.begin) + 1e-3 for segment in step.segments)


def test_recorder_that_is_off_records_nothing(alone: samestep.World, recorder: SpanRecorder) -> None:
    engine = make_engine(alone, recorder, loss=loss_with_collective)
    with recorder.recording_collectives(), recorder.step(1):
        recorder.enter("data")
        engine.step(random_batch(alone, 12, 3))
    assert recorder.steps == []


def test_collectives_of_user_code_are_recorded_with_their_line(alone: samestep.World, recorder: SpanRecorder) -> None:
    engine = make_engine(alone, recorder, loss=loss_with_collective)
    engine.step(random_batch(alone, 12, 3))  # the first step sends its statistics after the backward
    recorder.is_on = True
    with recorder.recording_collectives():
        with recorder.step(1):
            recorder.enter("data")
            engine.step(random_batch(alone, 12, 3))
        alone.barrier()
    [step] = recorder.steps
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
