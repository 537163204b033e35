"""Stages of a model on GPUs of their own: `pytest -m gpu` on a machine that has two."""

import pytest
import torch

import samestep
from ranks_pipeline import made, pipeline
from samestep.config import StrategyPart
from samestep.runtime.launch import launch
from ten_steps import steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def losses(part: StrategyPart | None) -> list[tuple[float, float]]:
    with samestep.start(device="cuda", strategy=part) as world:
        engine, batches, _ = made(world, "deep")
        return steps_of(engine, batches, 6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_stages_compute_what_one_gpu_does(schedule: str) -> None:
    expected = launch(losses, None, processes=1)
    found = launch(losses, pipeline(2, schedule), processes=2)
    assert found == [pytest.approx(step, rel=1e-10) for step in expected]
