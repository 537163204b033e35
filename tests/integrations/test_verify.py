"""`samestep verify` on a script for each framework."""

from pathlib import Path

import pytest

from helpers.migration_pages import EXAMPLES
from helpers.system import samestep

DEVICES = ("devices = int(sys.argv[1]) if len(sys.argv) > 1 else 1", "devices = int(os.environ['LOCAL_WORLD_SIZE'])")


@pytest.mark.long
@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_verify_compares_the_script_of_an_adapter(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / f"{name}_after.py").read_text(encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("import os\n" + text.replace(*DEVICES), encoding="utf-8")
    done = samestep("verify", script, "--processes", "2,3", "--out", tmp_path / "out", cwd=tmp_path, timeout=220)
    assert done.code == 0, done.out + done.err
    compared = [line.split() for line in done.out.splitlines() if line.startswith(("weights", "gradients", "order"))]
    assert len(compared) == 3
    assert all(row[-1] == "bits" for row in compared)
    assert (tmp_path / "out/certificate.json").exists()
