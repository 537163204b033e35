"""Tests of the recorded phases and collectives of a step, and of the summary of torch's profiler."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

import samestep
from helpers.batches import random_batch
from helpers.models import Perceptron, seeded
from helpers.simulated_accelerator import simulated_accelerator
from helpers.waits import Waits
from samestep import Loss
from samestep.config import StepConfig
from samestep.tools.profile.profile import CLOCK_MARK, find_traces, read_trace
from samestep.tools.profile.recorder import RankProfiler, SpanRecorder, summarize


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
    assert all("test_recorder.py:" in site for site in sites)
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


@pytest.fixture
def profiler(tmp_path: Path) -> RankProfiler:
    return RankProfiler(3, torch.device("cpu"), tmp_path, warmup=1, traced=2)


def run(profiler: RankProfiler, small: int, large: int) -> None:
    """Run three steps with `small` additions of scalars and `large` products of matrices."""
    scalar, matrix = torch.ones(1), torch.ones(600, 600)
    with profiler:
        for number in range(3):
            if number == 1:
                with record_function(CLOCK_MARK):
                    pass
            for _ in range(small):
                scalar + scalar
            for _ in range(large):
                matrix @ matrix
            profiler.step()


def test_operators_are_counted_per_step_and_divided_by_size(profiler: RankProfiler) -> None:
    run(profiler, small=200, large=3)
    summary = profiler.summary
    assert summary is not None
    calls = {operator["name"]: operator["calls"] for operator in summary.operators}
    assert calls["aten::add"] == 200
    assert calls["aten::mm"] == 3
    products = next(operator["seconds"] for operator in summary.operators if operator["name"] == "aten::mm")
    assert summary.small >= 190
    assert products > 0 and 0 < summary.working_seconds <= summary.step_seconds
    assert summary.busy_seconds is None


def test_steps_of_small_operators_do_hardly_any_work(profiler: RankProfiler) -> None:
    run(profiler, small=500, large=0)
    assert profiler.summary is not None
    assert profiler.summary.working_seconds < 0.5 * profiler.summary.step_seconds


def event(name: str, begin: float, end: float, *, is_annotation: bool = False, on_host: bool = False) -> FunctionEvent:
    """Return an event of a trace, with times in microseconds."""
    device = DeviceType.CPU if on_host else DeviceType.CUDA
    return FunctionEvent(
        len(name), name, 0, begin, end, device_type=device, is_user_annotation=is_annotation, use_device="cuda"
    )


def test_a_device_is_busy_with_its_own_kernels_only() -> None:
    trace = [
        event("ProfilerStep#1", 0, 1000, is_annotation=True, on_host=True),
        event("ProfilerStep#1", 0, 1000, is_annotation=True),
        event("Optimizer.step#SGD.step", 500, 900, is_annotation=True),
        event("nccl:all_reduce", 300, 700, is_annotation=True),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 700),
        event("gemm", 100, 250),
        event("gemm", 200, 350),  # of another stream
        event("Memcpy DtoH (Device -> Pinned)", 800, 850),
        event("cudaStreamSynchronize", 850, 900, on_host=True),
    ]
    summary = summarize(trace, 1)
    assert summary.busy_seconds == pytest.approx(300e-6)
    assert summary.step_seconds == pytest.approx(1000e-6)
    assert summary.communication_seconds == pytest.approx(400e-6)
    assert summary.synchronisations == 1


def test_trace_has_a_name_for_tensorboard_and_a_clock_mark(profiler: RankProfiler, tmp_path: Path) -> None:
    run(profiler, small=1, large=0)
    [(rank, path)] = find_traces(tmp_path).items()
    assert rank == 3
    assert [event["name"] for event in read_trace(path)].count(CLOCK_MARK) == 1
