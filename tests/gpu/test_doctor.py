"""Tests of `samestep doctor` on a machine with GPUs: `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from helpers.system import answer
from samestep.cli.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_gpus_and_self_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json", "--runs", str(tmp_path)])
    findings = {finding["name"]: finding for finding in answer(capsys)["findings"]}
    assert findings["GPUs"]["verdict"] == "pass"
    assert findings["self-test"]["verdict"] == "pass"
    assert ("cuda" in findings["self-test"]["value"]) == ("GPU links" in findings) == (torch.cuda.device_count() > 1)
