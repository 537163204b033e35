"""The picture on a terminal."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from samestep.tools.top.picture import Picture, RankRow
from samestep.tools.top.shown import drawn, svg

LINE = {
    "step": 1234,
    "samples_per_second": 120.5,
    "data_share": 0.12,
    "wait_share": 0.3,
    "cpu_percent": 97.4,
    "memory_bytes": 512_000_000,
    "gpu": None,
    "doing": "in engine.step 1235, waiting in the sum in tree order",
}
GPU = {"name": "a", "memory_bytes": 3_000_000_000, "memory_total_bytes": 8_000_000_000, "use_percent": 88}


def row(rank: int, sign: Any = "heard", **more: Any) -> RankRow:
    return RankRow(rank, sign, 1.0, {**LINE, **more})


PICTURE = Picture(
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
    ranks=[row(0), row(1, "silent"), row(2, "gone"), RankRow(3, "not heard", None, {})],
)


def printed(picture: Picture, width: int = 100, height: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(drawn(picture, width, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_what_there_is_to_know_of_a_run() -> None:
    head, progress, numbers, titles, *ranks = printed(PICTURE)
    assert head == "runs/[bold]a  running  lost: 2"
    assert re.fullmatch(r"epoch 2/15  \S+ +12%  step 1,234 of 10,000  1:02:05 left", progress)
    assert numbers == "loss 0.4322   evaluation 1: loss 0.5000  samples 360  accuracy 75.00%"
    assert titles.split() == ["rank", "step", "samples/s", "data", "others", "CPU", "memory", "does", "heard"]
    assert re.split(r"  +", ranks[0].strip())[:7] == ["0", "1,234", "120", "12%", "30%", "97%", "512.0 MB"]
    assert [line[-10:].strip() for line in ranks] == ["1 s", "silent 1 s", "gone 1 s", "not yet"]
    assert len(ranks) == 4


@pytest.mark.parametrize("width", [80, 60, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    ranks = [row(0, gpu={**GPU, "temperature_c": 61}), *PICTURE.ranks[1:]]
    values = {**PICTURE.evaluation, **{f"metric_{n}": 0.5 for n in range(20)}}
    lines = printed(replace(PICTURE, evaluation=values, ranks=ranks, step=1_234_567, steps=10_000_000), width)
    assert len(lines) == 8
    assert max(map(len, lines)) <= width
    assert lines[1].endswith("step 1,234,567 of 10,000,000  1:02:05 left")
    titles = lines[3].split()
    assert titles[:2] + titles[-2:] == ["rank", "step", "does", "heard"]
    assert ("GPU" in titles, "data" in titles, "°C" in titles) == (True, width >= 80, width == 200)
    assert "in engine.step" in lines[4]


def test_gpus_have_columns_where_there_are_any() -> None:
    found = printed(replace(PICTURE, ranks=[row(0, gpu={**GPU, "temperature_c": 61}), row(1, gpu=GPU)]), width=140)
    assert "GPU memory" in found[3]
    assert re.search(r" 88%  +3\.0 GB  61 ", found[4])
    assert re.search(r" 88%  +3\.0 GB   - ", found[5])


def test_numbers_that_nobody_knows_are_dashes() -> None:
    unknown = {name: None for name in LINE}
    assert printed(replace(PICTURE, ranks=[row(0, **unknown)]))[4].split()[:7] == ["0", *["-"] * 6]
    first = replace(PICTURE, loss="nan", evaluation={}, steps=None, seconds_left=None, epoch=0, ranks=[])
    assert printed(first)[2] == "loss nan"
    assert printed(replace(first, loss=None))[2] == "no step yet"


def test_with_more_ranks_than_lines_those_in_trouble_are_shown() -> None:
    ranks = [row(rank, "silent" if rank == 90 else "heard") for rank in range(100)]
    lines = printed(replace(PICTURE, ranks=ranks), height=20)
    assert len(lines) <= 20
    assert any(line.split()[0] == "90" and "silent" in line for line in lines[4:])
    assert lines[-1] == "and 87 more"


def test_a_dead_run_and_lines_that_were_cut_are_told() -> None:
    lines = printed(replace(PICTURE, state="dead", unreadable_lines=2))
    assert lines[0] == "runs/[bold]a  dead  no process holds it, and it has told no end"
    assert lines[-1] == "2 lines cannot be read"


def test_an_svg_loads_nothing() -> None:
    made = svg(PICTURE, 110)
    assert made.startswith("<svg ")
    assert "url(http" not in made
    assert "@font-face" not in made
    for text in ("step&#160;1,234", "512.0&#160;MB", "silent"):
        assert text in made
