"""Rendering for a terminal and as SVG."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from samestep.tools.top.display import render, render_svg
from samestep.tools.top.run_status import RankRow, RunStatus

LINE = {
    "step": 1234,
    "samples_per_second": 120.5,
    "data_share": 0.12,
    "wait_share": 0.3,
    "cpu_percent": 97.4,
    "memory_bytes": 512 << 20,
    "gpu": None,
    "doing": "in engine.step 1235, waiting in a tree all-reduce",
}
GPU = {"name": "a", "memory_bytes": 3 << 30, "memory_total_bytes": 8 << 30, "use_percent": 88}


def row(rank: int, sign: Any = "active", **values: Any) -> RankRow:
    return RankRow(rank, sign, 1.0, {**LINE, **values})


STATUS = RunStatus(
    run="runs/[bold]a",
    state="running",
    epoch=2,
    epochs=15,
    step=1234,
    steps=10_000,
    progress=0.1234,
    seconds_left=3725.0,
    loss=0.43219,
    evaluation={"epoch": 1, "loss": 0.5, "samples": 360, "accuracy": 0.75},
    ranks=[row(0), row(1, "silent"), row(2, "gone"), RankRow(3, "missing", None, {})],
)


def printed(status: RunStatus, width: int = 100, height: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(render(status, width, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_state_progress_values_and_ranks() -> None:
    head, progress, numbers, titles, *ranks = printed(STATUS)
    assert head == "runs/[bold]a  running  lost: 2"
    assert re.fullmatch(r"epoch 2/15  \S+ +12%  step 1,234 of 10,000  1:02:05 left", progress)
    assert numbers == "loss 0.4322   evaluation 1: loss 0.5000  samples 360  accuracy 75.00%"
    assert titles.split() == ["rank", "step", "samples/s", "data", "wait", "CPU", "memory", "activity", "age"]
    assert re.split(r"  +", ranks[0].strip())[:7] == ["0", "1,234", "120", "12%", "30%", "97%", "512 MiB"]
    assert [line[-10:].strip() for line in ranks] == ["1 s", "silent 1 s", "gone 1 s", "not yet"]
    assert len(ranks) == 4


@pytest.mark.parametrize("width", [80, 60, 200])
def test_lines_fit_the_width(width: int) -> None:
    ranks = [row(0, gpu={**GPU, "temperature_c": 61}), *STATUS.ranks[1:]]
    values = {**STATUS.evaluation, **{f"metric_{n}": 0.5 for n in range(20)}}
    lines = printed(replace(STATUS, evaluation=values, ranks=ranks, step=1_234_567, steps=10_000_000), width)
    assert len(lines) == 8
    assert max(map(len, lines)) <= width
    assert lines[1].endswith("step 1,234,567 of 10,000,000  1:02:05 left")
    titles = lines[3].split()
    assert titles[:2] + titles[-2:] == ["rank", "step", "activity", "age"]
    assert ("GPU" in titles, "data" in titles, "°C" in titles) == (True, width >= 80, width == 200)
    assert "in engine.step" in lines[4]


def test_gpu_columns_appear_with_gpus() -> None:
    lines = printed(replace(STATUS, ranks=[row(0, gpu={**GPU, "temperature_c": 61}), row(1, gpu=GPU)]), width=140)
    assert "GPU memory" in lines[3]
    assert re.search(r" 88%  +3 GiB  61 ", lines[4])
    assert re.search(r" 88%  +3 GiB   - ", lines[5])


def test_unknown_values_are_dashes() -> None:
    unknown = {name: None for name in LINE}
    assert printed(replace(STATUS, ranks=[row(0, **unknown)]))[4].split()[:7] == ["0", *["-"] * 6]
    first = replace(STATUS, loss="nan", evaluation={}, steps=None, seconds_left=None, epoch=0, ranks=[])
    assert printed(first)[2] == "loss nan"
    assert printed(replace(first, loss=None))[2] == "no step yet"


def test_few_lines_show_inactive_ranks_first() -> None:
    ranks = [row(rank, "silent" if rank == 90 else "active") for rank in range(100)]
    lines = printed(replace(STATUS, ranks=ranks), height=20)
    assert len(lines) <= 20
    assert any(line.split()[0] == "90" and "silent" in line for line in lines[4:])
    assert lines[-1] == "and 87 more"


def test_dead_run_and_unreadable_lines() -> None:
    lines = printed(replace(STATUS, state="dead", unreadable_lines=2))
    assert lines[0] == "runs/[bold]a  dead  no process holds the lock, and no end is logged"
    assert lines[-1] == "2 unreadable lines"


def test_svg_has_no_external_resources() -> None:
    svg = render_svg(STATUS, 110)
    assert svg.startswith("<svg ")
    assert "url(http" not in svg
    assert "@font-face" not in svg
    for text in ("step&#160;1,234", "512&#160;MiB", "silent"):
        assert text in svg
