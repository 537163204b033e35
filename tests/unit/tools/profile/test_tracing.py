"""What is read off the events of torch's profiler."""

from pathlib import Path

import pytest
import torch

from samestep.tools.profile.merge import CLOCK_MARK, read_trace
from samestep.tools.profile.profiled import traces_in
from samestep.tools.profile.tracing import FOLDER, Tracing, mark


@pytest.fixture
def tracing(tmp_path: Path) -> Tracing:
    return Tracing(3, torch.device("cpu"), tmp_path, warmup=1, traced=2)


def run(tracing: Tracing, small: int, large: int) -> None:
    """Three steps: so many tiny sums, and so many products of large matrices."""
    few, many = torch.ones(1), torch.ones(600, 600)
    with tracing.running() as next_step:
        for number in range(3):
            if number == 1:
                mark(lambda: 0.0)
            for _ in range(small):
                few + few
            for _ in range(large):
                many @ many
            next_step()


def test_operators_are_counted_a_step_and_told_apart_by_what_they_compute(tracing: Tracing) -> None:
    run(tracing, small=200, large=3)
    found = tracing.found
    assert found is not None
    calls = {name: number for name, number, _ in found.operators}
    assert calls["aten::add"] == 200
    assert calls["aten::mm"] == 3
    products = next(seconds for name, _, seconds in found.operators if name == "aten::mm")
    assert found.small >= 190
    assert 0.3 * products <= found.working_seconds <= found.step_seconds
    assert found.busy_seconds is None


def test_steps_without_anything_large_do_next_to_no_work(tracing: Tracing) -> None:
    run(tracing, small=500, large=0)
    assert tracing.found is not None
    assert tracing.found.working_seconds < 0.5 * tracing.found.step_seconds


def test_the_trace_is_written_where_tensorboard_looks_and_has_its_mark(tracing: Tracing, tmp_path: Path) -> None:
    run(tracing, small=1, large=0)
    [(rank, path)] = traces_in(tmp_path / FOLDER).items()
    assert rank == 3
    assert [event["name"] for event in read_trace(path)["traceEvents"]].count(CLOCK_MARK) == 1
