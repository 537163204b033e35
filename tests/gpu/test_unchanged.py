"""Unchanged scripts on one GPU that several ranks share: `pytest -m gpu` on a machine with one."""

import re
from pathlib import Path

import pytest
import torch

from helpers.system import samestep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

SCRIPT = """
import torch
from torch import nn

device = torch.device("cuda:0")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(1024, 512)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))
for images, labels in torch.utils.data.DataLoader(data, batch_size=256, shuffle=True, pin_memory=True):
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
print(torch.cuda.device_count(), next(model.parameters()).device)
"""


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_SHARE_GPU", "1")


def output(folder: Path, *options: object) -> str:
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = samestep("run", *options, script, cwd=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_are_those_of_one_process(strategy: str, tmp_path: Path) -> None:
    one = output(tmp_path, "--processes", 1)
    expected = [float(number) for number in re.findall(r"loss (\S+)", one)]
    for processes in (2, 3):
        several = output(tmp_path, "--processes", processes, "--strategy", strategy)
        found = [float(number) for number in re.findall(r"loss (\S+)", several)]
        assert found == pytest.approx(expected, rel=1e-3)
        assert several.splitlines()[-1] == "1 cuda:0"


def test_exact_has_the_bits_of_one_process(tmp_path: Path) -> None:
    one = output(tmp_path, "--processes", 1, "--exact")
    assert output(tmp_path, "--processes", 2, "--exact").splitlines()[:-1] == one.splitlines()[:-1]


def test_device_of_another_process_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2).to('cuda:7')\n", encoding="utf-8")
    done = samestep("run", "--processes", 2, script, cwd=tmp_path)
    assert done.code == 2
    assert "E_DEVICES" in done.err
