"""Table of docs/guides/gpu.md: which checks have run on which machines, from the files in benchmarks/results/gpu.

`python tests/docs/test_gpu_page.py` writes it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/gpu.md"
RESULTS = ROOT / "benchmarks/results/gpu"
CPU = "CPU"
PLACES = {"gpu": "one GPU", "nccl": "shared GPU with NCCL", "gpus": "several GPUs"}  # of targets of make
_HEADING = "## What has run where"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of all files of results, the newest first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return sorted(files, key=lambda file: (file["machine"]["date"], file["device"]), reverse=True)


def table_lines(files: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a table with one row per target and one column per place; files are the newest first.

    A cell has the newest verdict of each check.
    """
    cells: dict[tuple[str, str], list[str]] = {}
    shown: set[tuple[str, str, str]] = set()  # by target and place
    for file in files:
        target = file.get("target", "gpu")
        place = CPU if file["device"] == "cpu" else PLACES[target]
        checks = [line for line in file["checks"] if (target, place, line["check"]) not in shown]
        shown |= {(target, place, line["check"]) for line in checks}
        if text := _cell(file, checks):
            cells.setdefault((target, place), []).append(text)
    lines = [f"| | {' | '.join([CPU, *PLACES.values()])} |", f"|{'---|' * (len(PLACES) + 2)}"]
    for target, own_place in PLACES.items():
        row = [f"`make {target}`"]
        for place in (CPU, *PLACES.values()):
            texts = cells.get((target, place), [])
            is_possible = place in (CPU, own_place)
            row.append("; ".join(texts) or ("has not run" if is_possible else ""))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _cell(file: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of passed and failed checks, device and date; nothing without any."""
    texts = []
    for verdict in ("pass", "fail"):
        names = [line["check"] for line in checks if line["verdict"] == verdict]
        if names:
            texts.append(f"{verdict}: {', '.join(f'`{name}`' for name in names)}")
    if not texts:
        return ""
    return f"{'; '.join(texts)} ({file['device']}, {file['machine']['date']})"


def updated_page() -> str:
    """Return the text of the page with the current table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(number for number in range(lines.index(_HEADING), len(lines)) if lines[number].startswith("|"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    lines[first:end] = table_lines(read_results(RESULTS))
    return "\n".join(lines) + "\n"


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
    assert PAGE.read_text(encoding="utf-8") == updated_page(), "run python tests/docs/test_gpu_page.py"


def test_nothing_has_run_without_files() -> None:
    rows = table_lines([])[2:]
    assert [row.count("has not run") for row in rows] == [2, 2, 2]
    assert not any("pass" in row for row in rows)


def test_cell_has_the_newest_verdict_of_each_check() -> None:
    later = {**FILE, "machine": {"date": "2026-01-03"}, "checks": FILE["checks"][:1]}
    old = {**FILE, "device": "B1", "target": "gpu", "checks": FILE["checks"][:1]}
    gpu, nccl, gpus = table_lines([later, FILE, old])[2:]
    assert "| pass: `bits` (cpu, 2026-01-03); pass: `links`; fail: `faults` (cpu, 2026-01-02) | " in gpus
    assert gpus.count("has not run") == nccl.count("has not run") - 1 == 1
    assert "| pass: `bits` (B1, 2026-01-02) |" in gpu


def test_newest_file_is_first(tmp_path: Path) -> None:
    for name, date in (("a", "2026-01-02"), ("b", "2026-01-03")):
        file = {**FILE, "machine": {"date": date}}
        (tmp_path / f"{name}.json").write_text(json.dumps(file), encoding="utf-8")
    assert [file["machine"]["date"] for file in read_results(tmp_path)] == ["2026-01-03", "2026-01-02"]


if __name__ == "__main__":
    PAGE.write_text(updated_page(), encoding="utf-8")
