"""The example draws three curves in the order that the page on batch norm describes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_curves_are_drawn_and_sync_lies_on_the_whole_batch(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "batch_norm_curves.py"), "--epochs", "1"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "batch-norm-curves.png").read_bytes().startswith(b"\x89PNG")
    whole, microbatch, sync = (float(line.split()[-3]) for line in done.stdout.splitlines()[1:])
    assert sync == pytest.approx(whole, rel=0.02)
    assert microbatch > 1.1 * whole
