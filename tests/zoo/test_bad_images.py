"""Bad images and rows under both policies of `data.bad_samples`, on one and three processes."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.image_kinds import READ, REFUSED, encoded, noise, write
from samestep.launcher.launch import launch
from workers import images as ranks_images

COUNT = 12


def folder_of(place: Path, kind: str) -> Path:
    """Write two classes with one image of a kind; `read`: of every valid kind."""
    for name in ("one", "two"):
        (place / name).mkdir(parents=True)
        for number in range(COUNT):
            (place / name / f"{number}.png").write_bytes(encoded(noise(9 + number), "PNG"))
    for image in READ if kind == "read" else (kind,):
        write(place / "two", image)
    return place


def list_of(place: Path, fault: Callable[[list[str]], list[str]]) -> Path:
    """Write a list with one invalid row."""
    place.mkdir()
    lines = [["path", "label"]]
    for number in range(2 * COUNT):
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


Outcomes = dict[str, dict[str, Any]]
QUICK = ("cut-jpeg", "no-file", "read")
REST = tuple(name for name in (*REFUSED, *LINES) if name not in QUICK)


def outcomes(place: Path, names: tuple[str, ...]) -> tuple[Outcomes, Outcomes]:
    """Return the outcomes of each dataset on 1 and on 3 processes."""
    paths = [list_of(place / name, LINES[name]) if name in LINES else folder_of(place / name, name) for name in names]
    alone, together = (launch(ranks_images.outcomes, paths, processes=count) for count in (1, 3))
    return dict(zip(names, alone, strict=True)), dict(zip(names, together, strict=True))


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_outcome_does_not_depend_on_processes(names: tuple[str, ...], tmp_path: Path) -> None:
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
    """Require one bad sample in one of the splits; training reads it in both epochs."""
    (message,) = outcome["stop"]
    first = message.splitlines()[0].rpartition(" [")[0]  # without the code
    if name in LINES:
        assert f"{name}/nowhere.png" in first if name == "no-file" else f"{name}/list.csv, line 6: " in first
    else:
        assert f"two/{name}.{REFUSED[name][0]}" in first
    assert "data.bad_samples: skip" in message
    assert outcome["skip"]["left_out"] in ([[first, first], []], [[], [first]])
