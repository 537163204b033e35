"""Benchmark of communication: bytes counted by the kernel agree with the formulas."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.slow
def test_bytes_and_memory_agree_with_formulas(tmp_path: Path) -> None:
    layouts = ["ddp exact", "ddp fp16", "fsdp", "fsdp exact", "hsdp"]
    command = [sys.executable, ROOT / "benchmarks" / "communication.py", "--processes", "4", "--layouts", *layouts]
    subprocess.run([*command, "--output", tmp_path / "result.json"], check=True, timeout=100)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["layout"] for row in rows] == layouts
    for row in rows:
        # Other messages of a step have some tens of kilobytes; FSDP keeps some gathered parameters for the backward.
        assert row["sent"] == pytest.approx(row["sent_by_formula"], rel=0.01), row
        assert row["held"] == pytest.approx(row["held_by_formula"], rel=0.01), row
    assert "| ddp fp16 " in (tmp_path / "result.md").read_text()
