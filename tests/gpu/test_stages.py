"""Stages of a model on GPUs of their own: `pytest -m gpu` on a machine that has two."""

import pytest
import torch

import samestep
from helpers.ten_steps import steps_of
from samestep.config import StrategyConfig
from samestep.launcher.launch import launch
from workers.pipeline import build, pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def losses(part: StrategyConfig | None) -> list[tuple[float, float]]:
    with samestep.start(device="cuda", strategy=part) as world:
        engine, batches, _ = build(world, "deep")
        return steps_of(engine, batches, 6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_stages_compute_what_one_gpu_does(schedule: str) -> None:
    expected = launch(losses, None, processes=1)
    found = launch(losses, pipeline(2, schedule), processes=2)
    assert found == [pytest.approx(step, rel=1e-10) for step in expected]
