"""The table of what has run on GPUs is that of the files of results."""

import json
from pathlib import Path

from helpers.gpu_page import PAGE, read_results, table_lines, updated_page

FILE = {
    "machine": {"date": "2026-01-02"},
    "device": "cpu",
    "target": "gpus",
    "commit": "abc",
    "checks": [
        {"check": "bits", "verdict": "pass"},
        {"check": "links", "verdict": "pass"},
        {"check": "faults", "verdict": "fail"},
        {"check": "speed", "verdict": "skipped"},
    ],
}


def test_table_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == updated_page(), "run python tests/helpers/gpu_page.py"


def test_nothing_has_run_without_files() -> None:
    rows = table_lines([])[2:]
    assert [row.count("has not run") for row in rows] == [2, 2, 2]
    assert not any("pass" in row for row in rows)


def test_cell_has_the_newest_file_of_a_device() -> None:
    later = {**FILE, "machine": {"date": "2026-01-03"}, "checks": FILE["checks"][:1]}
    old = {"machine": {"date": "2025-12-31"}, "device": "B1", "checks": [{"check": "bits", "verdict": "pass"}]}
    gpu, nccl, gpus = table_lines([old, FILE])[2:]
    assert "| pass: `bits`, `links`; fail: `faults` (cpu, 2026-01-02) | " in gpus
    assert gpus.count("has not run") == nccl.count("has not run") - 1 == 1
    assert "| pass: `bits` (B1, 2025-12-31, before divided calls existed) |" in gpu
    assert "| pass: `bits` (cpu, 2026-01-03) |" in table_lines([FILE, later])[4]


def test_newest_file_is_last(tmp_path: Path) -> None:
    for name, date in (("a", "2026-01-03"), ("b", "2026-01-02")):
        file = {**FILE, "machine": {"date": date}}
        (tmp_path / f"{name}.json").write_text(json.dumps(file), encoding="utf-8")
    assert [file["machine"]["date"] for file in read_results(tmp_path)] == ["2026-01-02", "2026-01-03"]
