"""Reports of errors of a GPU: `pytest -m gpu` on a machine with one."""

from pathlib import Path

import pytest
import torch

from helpers.system import Done, events, samestep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SCRIPT = """
import sys

import torch
from torch import nn
from torch.nn import functional

import samestep

_, fault, reduction = sys.argv
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)).to(device)
samestep.parallel(model, reduction=reduction)
images = torch.randn(16, 3, 32, 32, device=device)
labels = torch.arange(16, device=device) % 10
if fault == "memory":
    held = torch.empty(2**48, dtype=torch.uint8, device=device)
if fault == "label" and not samestep.is_main():
    labels = labels + 100
functional.cross_entropy(model(images), labels).backward()
"""


def run(folder: Path, processes: int, fault: str, reduction: str = "fast") -> Done:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return samestep("run", "--processes", processes, script, fault, reduction, cwd=folder)


def test_lack_of_memory_has_numbers_and_fixes(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "memory")
    assert done.code == 1
    assert "reserved by torch" in done.err
    assert "1. bf16" in done.err


def test_operator_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "none", "exact")
    assert done.code == 1
    assert "adaptive_avg_pool2d_backward_cuda has no deterministic kernel [E_NO_DETERMINISTIC_KERNEL]" in done.err


@pytest.mark.parametrize("sharing", ["1", "nccl"])
def test_label_out_of_range_is_reported_by_its_rank(
    sharing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times: a thread of torch that ends the process would win sometimes."""
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", sharing)
    for _ in range(3):
        done = run(tmp_path, 2, "label")
        assert done.code == 1
        assert "error: rank 1 failed" in done.err
        assert "device-side assert" in done.err
        assert "E_RANK_FAILED" in done.err


def test_recipe_logs_memory_of_each_epoch_and_hints_once(tmp_path: Path) -> None:
    run = tmp_path / "runs/first"
    commands = (("train", "digits", "--name", "first", "epochs=1"), ("resume", run, "epochs=2"))
    for command in commands:
        done = samestep(*command, "--processes", 1, cwd=tmp_path)
        assert done.code == 0, done.err
    memory = events(run, "memory")
    assert len(memory) == 2
    assert all(0 < event["peak_bytes"] < event["total_bytes"] for event in memory)
    notes = [event["text"] for event in events(run, "note")]
    assert sum("step.precision: bf16" in text for text in notes) == 1
    assert sum("step.channels_last" in text for text in notes) == 1
