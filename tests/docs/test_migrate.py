"""Each script that was moved over prints what it printed before, on any number of processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from migration_pages import EXAMPLES, NAMES, page, written
from system import environment, samestep

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# torchvision's own kernels are missing where a CPU build of torch meets another build of it; Lightning imports it.
SHIM = """
import runpy, sys
from samestep.runtime.vision import make_torchvision_importable
make_torchvision_importable()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def printed(*arguments: object, cwd: Path) -> float:
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
    (found,) = re.findall(r"^loss (\d+\.\d{4})$", text, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_what_is_run(name: str) -> None:
    assert page(name).read_text(encoding="utf-8") == written(name), "python tests/migration_pages.py writes it"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_what_it_was(name: str, tmp_path: Path) -> None:
    before, after = EXAMPLES / f"{name}_before.py", EXAMPLES / f"{name}_after.py"
    start = {"ddp": TORCHRUN, "lightning": ("-c", SHIM)}.get(name, ())
    expected = printed(*start, before, cwd=tmp_path)
    found = printed(after, cwd=tmp_path)
    assert found == pytest.approx(expected, abs=2e-4)
    done = samestep("run", "--processes", 3, after, cwd=tmp_path)
    assert done.code == 0, done.err
    assert loss_in(done.out) == found, "one process or three"
