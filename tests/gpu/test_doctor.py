"""What the doctor finds where there are GPUs: `pytest -m gpu` on a machine that has some. Not run on hardware yet."""

from pathlib import Path

import pytest
import torch

from samestep.cli.main import main
from system import answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_gpus_are_seen_and_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json", "--runs", str(tmp_path)])
    findings = {finding["name"]: finding for finding in answer(capsys)["findings"]}
    assert findings["GPUs"]["verdict"] == "pass"
    assert findings["CUDA and driver"]["verdict"] == "pass"
    assert findings["self-test"]["verdict"] == "pass"
    several = torch.cuda.device_count() > 1
    assert ("GPUs" in findings["all-reduce"]["value"]) == several
    assert ("peer-to-peer access" in findings) == several
