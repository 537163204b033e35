"""Targets of the Makefile that no other test runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IN_VENV = Path(sys.executable).parent == ROOT / ".venv" / "bin"
STEP_TIME = "--rounds 1 --warmup 1 --block 2 --models small --processes 2 --prefetched --comparisons peers"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IN_VENV or shutil.which("make") is None, reason="make runs the programs of .venv")
def test_bench_measures_every_contender(tmp_path: Path) -> None:
    """`-o` keeps the environment as it is."""
    settings = [f"RESULTS={tmp_path}", "STARTUP=--repeats 1 --processes 2", f"STEP_TIME={STEP_TIME}"]
    command = ["make", "-o", ".venv/.installed", "bench", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    startup, step_time = (
        json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("startup", "step_time")
    )
    (result,) = startup["results"]
    assert {"samestep train", "samestep.launch", "torchrun", "accelerate"} <= result["seconds"].keys()
    assert step_time["results"]
