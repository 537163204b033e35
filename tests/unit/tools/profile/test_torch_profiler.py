"""Tests of the summary and the trace of torch's profiler."""

from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import record_function

from samestep.tools.profile.profile import CLOCK_MARK, find_traces, read_trace
from samestep.tools.profile.recorder import RankProfiler, summarize


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
