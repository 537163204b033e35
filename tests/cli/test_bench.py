"""`samestep bench`: every way on every number of devices, one of them what others are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import EXIT_DONE, EXIT_INPUT
from system import answer, here, samestep

SMALL = ("--rounds", 2, "--steps", 2, "--set", "batch_size=240")


def compared(capsys: pytest.CaptureFixture[str], place: Path, *arguments: object) -> Any:
    assert here("bench", *arguments, "--json", cwd=place) == EXIT_DONE
    return answer(capsys)


@pytest.mark.slow
def test_ways_are_timed_in_turn_and_reach_what_training_reaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("digits", "--devices", "2", "--layout", "fsdp", "--epochs", 1, "--out", "found", *SMALL)
    found = compared(capsys, tmp_path, *arguments)
    ways = {(way["name"], way["devices"]): way for way in found["ways"]}
    assert ways["one device", 1]["speed_up"]["median"] == 1
    assert all(len(way["rounds"]) == 2 and way["samples_per_second"]["median"] > 0 for way in ways.values())
    assert all(way["memory_peak_bytes"] is None for way in ways.values())
    # Of the recipe as it is the number of devices is no hyperparameter; nor is the way in which copies are summed.
    shards = found["recipe"]["shards"]
    alone, several = ways[f"{shards} shards as in the recipe", 1], ways[f"ddp, {shards} shards as in the recipe", 2]
    assert alone["evaluation"] == several["evaluation"]
    assert ways["dp", 2]["evaluation"] == ways["ddp", 2]["evaluation"]
    assert ways["fsdp", 2]["memory_held_bytes"] < 0.6 * ways["ddp", 2]["memory_held_bytes"]
    assert json.loads((tmp_path / "found/bench.json").read_text())["ways"] == found["ways"]
    assert (tmp_path / "found/bench.png").stat().st_size > 10_000


@pytest.mark.slow
def test_what_cannot_run_is_told_and_the_rest_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("digits", "--devices", "2", "--layout", "tp", "--epochs", 0, "--no-picture", "--rounds", 1, "--steps", 1)
    found = compared(capsys, tmp_path, *given, "--set", "batch_size=4", "shards=4")
    reasons = {each["name"]: each["reason"] for each in found["not_run"]}
    assert "batch_size is 4" in reasons["ddp, 4 shards a rank"]
    assert "no ready plan" in reasons["tp"]
    assert {way["name"] for way in found["ways"]} >= {"one device", "ddp", "dp", "ddp, bf16"}
    assert all(not way["evaluation"] for way in found["ways"])
    assert not list((tmp_path / found["folder"]).glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--devices", "0"), "--devices 0"),
        (("--devices", "two"), "--devices two"),
        (("--rounds", "0"), "--rounds 0"),
        (("--epochs", "-1"), "--epochs -1"),
        (("--layout", "fdsp"), "'fdsp'"),
        (("--layout", "hsdp:sharp=2"), "sharp=2"),
        (("--set", "batch=3"), "batch"),
    ],
)
def test_wrong_input_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert here("bench", "digits", *arguments, cwd=tmp_path) == EXIT_INPUT
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(tmp_path: Path) -> None:
    assert "example: samestep bench digits" in samestep("bench", "--help", cwd=tmp_path).out
