"""Test of `samestep profile` on a GPU, with the clock of its stream."""

from pathlib import Path

import pytest
import torch

from helpers.system import answer, here
from samestep.errors import EXIT_DONE
from samestep.tools.profile import PHASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_phases_add_up_to_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert here("profile", "digits", "--device", "cuda", "--json", "--out", "output", cwd=tmp_path) == EXIT_DONE
    result = answer(capsys)
    [rank] = result["ranks"]
    assert sum(rank[phase] for phase in PHASES) == pytest.approx(result["step_seconds"], rel=0.05)
    assert list((tmp_path / "output" / "tensorboard").glob("rank-0.*.pt.trace.json.gz"))
