"""Migrated scripts print the loss of the original scripts, on any number of processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.migration_pages import EXAMPLES, NAMES, page, updated_page
from helpers.system import environment, samestep

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Lightning imports torchvision, whose kernels are missing if its build does not match a CPU build of torch.
SHIM = """
import runpy, sys
from samestep.torchvision_import import make_torchvision_importable
make_torchvision_importable()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def printed_loss(*arguments: object, cwd: Path) -> float:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return loss_in(done.stdout)


def loss_in(text: str) -> float:
    (value,) = re.findall(r"^loss (\d+\.\d{4})$", text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_current_diff(name: str) -> None:
    assert page(name).read_text(encoding="utf-8") == updated_page(name), "run python tests/helpers/migration_pages.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_migrated_script_gives_the_same_loss(name: str, tmp_path: Path) -> None:
    before, after = EXAMPLES / f"{name}_before.py", EXAMPLES / f"{name}_after.py"
    start = {"ddp": TORCHRUN, "lightning": ("-c", SHIM)}.get(name, ())
    expected = printed_loss(*start, before, cwd=tmp_path)
    loss = printed_loss(after, cwd=tmp_path)
    assert loss == pytest.approx(expected, abs=2e-4)
    done = samestep("run", "--processes", 3, after, cwd=tmp_path)
    assert done.code == 0, done.err
    assert loss_in(done.out) == loss, "one and three processes"
