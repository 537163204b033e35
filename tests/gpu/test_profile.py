"""Where time goes on a GPU, by the clock of its stream. Not run on hardware yet."""

from pathlib import Path

import pytest
import torch

from samestep.errors import EXIT_DONE
from samestep.tools.profile.steps import PHASES
from system import answer, here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_phases_are_the_whole_step_and_the_gpu_is_seen_to_compute(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert here("profile", "digits", "--device", "cuda", "--json", "--out", "found", cwd=tmp_path) == EXIT_DONE
    found = answer(capsys)
    [rank] = found["ranks"]
    assert sum(rank[phase] for phase in PHASES) == pytest.approx(found["step_seconds"], rel=0.05)
    assert 0 < found["traced"]["0"]["busy_seconds"] < found["traced"]["0"]["step_seconds"]
