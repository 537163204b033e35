"""Scripts of users need the packages of the core only; a command for recipes names the extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import EXIT_DONE, EXIT_INPUT

# Python runs this module at its start, also in ranks: modules of extras cannot be imported.
_WITHOUT_EXTRAS = """
import sys
from importlib.machinery import PathFinder

MISSING = {"PIL", "matplotlib", "sklearn", "tensorboard", "timm", "torchmetrics", "torchvision", "transformers", "yaml"}

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""
_SCRIPT = """
import torch
from torch.utils.data import TensorDataset

import samestep

dataset = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
samestep.init(device="cpu")
model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = samestep.loader(dataset, batch_size=16)
manager = samestep.CheckpointManager("saved", model, loader, optimizer=optimizer)
for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
manager.save()
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(_WITHOUT_EXTRAS)
    (folder / "own.py").write_text(_SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "samestep", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_command_for_recipes_names_the_extra(tmp_path: Path) -> None:
    done = command(tmp_path, "train", "digits")
    assert done.returncode == EXIT_INPUT
    assert "[E_NOT_INSTALLED]" in done.stderr
    assert "samestep[recipes]" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "own.py", "--processes", "2"),
        pytest.param(("verify", "own.py", "--processes", "1,2"), marks=pytest.mark.long),
        ("doctor",),
    ],
)
def test_command_for_scripts_needs_the_core_only(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = command(tmp_path, *arguments)
    assert done.returncode == EXIT_DONE, done.stderr
