"""Functions of a script about its ranks."""

import time
from pathlib import Path

import samestep


def appended_lines(file: Path) -> list[str]:
    world = samestep.init(device="cpu")
    with samestep.main_first():
        if world.is_main:
            time.sleep(0.2)  # other ranks would write first
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{world.rank}\n")
    samestep.all_gather(None)
    return file.read_text(encoding="utf-8").split()


def test_main_first_runs_the_block_on_rank_0_before_others(tmp_path: Path) -> None:
    lines = samestep.launch(appended_lines, tmp_path / "lines", processes=3)
    assert lines[0] == "0"
    assert sorted(lines) == ["0", "1", "2"]


def test_main_first_runs_the_block_on_one_process(tmp_path: Path) -> None:
    assert samestep.launch(appended_lines, tmp_path / "lines", processes=1) == ["0"]
