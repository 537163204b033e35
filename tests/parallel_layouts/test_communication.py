"""The benchmark of what layouts send still runs, and what the kernel counts is what the formulas say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_layouts_send_and_hold_what_formulas_say(tmp_path: Path) -> None:
    layouts = ["ddp exact", "ddp fp16", "ddp powersgd", "fsdp"]
    command = [sys.executable, ROOT / "benchmarks" / "communication.py", "--processes", "4", "--layouts", *layouts]
    subprocess.run([*command, "--output", tmp_path / "found.json"], check=True, timeout=100)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["layout"] for row in rows] == layouts
    for row in rows:
        # What a step tells besides is some tens of kilobytes.
        assert row["sent"] == pytest.approx(row["sent_by_formula"], rel=0.02, abs=50_000), row
        assert row["held"] == pytest.approx(row["held_by_formula"], rel=0.01), row
    assert "| ddp powersgd | 4 " in (tmp_path / "found.md").read_text()
