"""Test of `samestep profile` on a GPU, with the clock of its stream."""

from pathlib import Path

import pytest
import torch

from helpers.system import answer, here
from samestep.errors import EXIT_DONE
from samestep.tools.profile.measurements import PHASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_phases_add_up_to_the_step_and_the_gpu_is_busy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert here("profile", "digits", "--device", "cuda", "--json", "--out", "output", cwd=tmp_path) == EXIT_DONE
    result = answer(capsys)
    [rank] = result["ranks"]
    assert sum(rank[phase] for phase in PHASES) == pytest.approx(result["step_seconds"], rel=0.05)
    assert 0 < result["traced"]["0"]["busy_seconds"] < result["traced"]["0"]["step_seconds"]
