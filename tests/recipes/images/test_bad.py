"""A bad image, or a bad line, ends the same on every number of processes, under either policy."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ranks_images
from image_kinds import READ, REFUSED, encoded, noise, write
from samestep.runtime.launch import launch
from system import events, here, weights

EACH = 12


def folder_of(place: Path, kind: str) -> Path:
    """Two classes, an image in one of which is of that kind; `read`: every kind that can be read."""
    for name in ("one", "two"):
        (place / name).mkdir(parents=True)
        for number in range(EACH):
            (place / name / f"{number}.png").write_bytes(encoded(noise(9 + number), "PNG"))
    for each in READ if kind == "read" else (kind,):
        write(place / "two", each)
    return place


def list_of(place: Path, fault: Callable[[list[str]], list[str]]) -> Path:
    """The same as a list, with a line that is wrong."""
    place.mkdir()
    lines = [["path", "label"]]
    for number in range(2 * EACH):
        (place / f"{number}.png").write_bytes(encoded(noise(9 + number), "PNG"))
        lines.append([f"{number}.png", ("one", "two")[number % 2]])
    lines[5] = fault(lines[5])
    path = place / "list.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


LINES: dict[str, Callable[[list[str]], list[str]]] = {
    "no-label": lambda line: [line[0], ""],
    "no-path": lambda line: ["", line[1]],
    "one-value": lambda line: line[:1],
    "three-values": lambda line: [*line, "three"],
    "no-file": lambda line: ["nowhere.png", line[1]],
}


Found = dict[str, dict[str, Any]]
QUICK = ("cut-jpeg", "no-file", "read")
REST = tuple(name for name in (*REFUSED, *LINES) if name not in QUICK)


def outcomes(place: Path, names: tuple[str, ...]) -> tuple[Found, Found]:
    """What becomes of a dataset with each fault, or with every image that can be read, on 1 and on 3 processes."""
    paths = [list_of(place / name, LINES[name]) if name in LINES else folder_of(place / name, name) for name in names]
    alone, together = (launch(ranks_images.outcomes, paths, processes=count) for count in (1, 3))
    return dict(zip(names, alone, strict=True)), dict(zip(names, together, strict=True))


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_outcome_is_the_same_on_every_number_of_processes(names: tuple[str, ...], tmp_path: Path) -> None:
    alone, together = outcomes(tmp_path, names)
    assert alone == together
    for name, outcome in alone.items():
        assert len(outcome["skip"]["weights"]) == 64
        if name == "read":
            assert outcome["stop"] == []
            assert outcome["skip"]["left_out"] == [[], []]
        else:
            require_one(name, outcome)


def require_one(name: str, outcome: dict[str, Any]) -> None:
    """One sample was bad, it is in one of the two splits, and two epochs of training meet it twice."""
    (said,) = outcome["stop"]
    first = said.splitlines()[0]
    if name in LINES:
        assert f"{name}/nowhere.png" in first if name == "no-file" else f"{name}/list.csv, line 6: " in first
    else:
        assert f"two/{name}.{REFUSED[name][0]}" in first
    assert "data.bad_samples: skip" in said
    assert outcome["skip"]["left_out"] in ([[first, first], []], [[], [first]])


@pytest.mark.slow
def test_command_stops_or_skips_as_the_recipe_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = folder_of(tmp_path / "images", "cut-jpeg")
    for kind in REFUSED:
        write(path / "one", kind)
    chosen = (f"data.options.path={path}", "data.options.image_size=32", "model.name=torchvision:squeezenet1_1")
    sizes = ("batch_size=8", "shards=4", "epochs=1", "metrics=[]")

    def train(name: str, processes: int, *more: str) -> int:
        arguments = ("train", "images", "--name", name, "--processes", processes, "--workers", 0)
        return here(*arguments, "--set", *chosen, *sizes, *more, cwd=tmp_path)

    for processes in (1, 3):
        assert train(f"stop-{processes}", processes) == 2
        assert "cannot be read as an image" in capfd.readouterr().err
        assert train(f"skip-{processes}", processes, "data.bad_samples=skip") == 0
    runs = [tmp_path / "runs" / f"skip-{processes}" for processes in (1, 3)]
    assert weights(runs[0]) == weights(runs[1])
    told = [[(event["split"], event["count"], event["samples"]) for event in events(run, "skipped")] for run in runs]
    assert told[0] == told[1]
    assert sum(count for _, count, _ in told[0]) == len(REFUSED) + 1
    assert any("two/cut-jpeg.jpg" in sample for _, _, samples in told[0] for sample in samples)
