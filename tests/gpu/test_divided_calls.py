"""Divided calls on one GPU that several ranks share: `pytest -m gpu` on a machine with one."""

import json
from pathlib import Path

import pytest
import torch

from helpers.system import samestep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SCRIPT = """
import json
import sys

import torch
from torch import nn
from torch.nn import functional

import samestep

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dropout = float(sys.argv[1])
compiled = sys.argv[2] == "compiled"
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Dropout(dropout),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(512, 10),
).to(device)
samestep.parallel(model, strict=True)
run = torch.compile(model) if compiled else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(1)
losses = []
for _ in range(8):
    images = torch.randn(16, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(0, 10, (16,), generator=generator).to(device)
    loss = functional.cross_entropy(run(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if samestep.is_main():
    print(json.dumps(losses))
"""


@pytest.fixture(autouse=True, params=["1", "nccl"])
def shared_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", request.param)


def losses(folder: Path, processes: int, *arguments: object) -> list[float]:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = samestep("run", "--processes", processes, script, *arguments, cwd=folder)
    assert done.code == 0, done.err
    found: list[float] = json.loads(done.out.splitlines()[-1])
    return found


@pytest.mark.parametrize("compiled", ["eager", "compiled"])
def test_losses_are_those_of_one_process(compiled: str, tmp_path: Path) -> None:
    one = losses(tmp_path, 1, 0.0, "eager")
    for processes in (2, 3):
        assert losses(tmp_path, processes, 0.0, compiled) == pytest.approx(one, rel=1e-3)


def test_ranks_that_compute_the_same_by_themselves_stay_equal(tmp_path: Path) -> None:
    # So small that its calls are whole; without deterministic kernels the gradients of convolutions differ in bits.
    options = ("--device", "cuda", "--processes", 2, "epochs=2", "--json")
    done = samestep("train", "digits", *options, cwd=tmp_path)
    assert done.code == 0, done.err


def test_random_draws_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    assert losses(tmp_path, 4, 0.3, "eager") == pytest.approx(losses(tmp_path, 2, 0.3, "eager"), rel=1e-3)
