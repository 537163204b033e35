"""Tests of `samestep bench`: all variants on all numbers of devices, relative to one device."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.system import Running, answer, here
from samestep.errors import EXIT_DONE, EXIT_STOPPED

SMALL = ("--rounds", 2, "--steps", 2, "batch_size=240")


def run_bench(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> Any:
    assert here("bench", *arguments, "--json", cwd=folder) == EXIT_DONE
    return answer(capsys)


@pytest.mark.slow
def test_variants_are_timed_in_turn_and_trained_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--devices", "2", "--ways", "ddp,exact", "--layout", "fsdp", "--epochs", 1)
    arguments = ("digits", *options, "--out", "output", *SMALL)
    result = run_bench(capsys, tmp_path, *arguments)
    variants = {(way["name"], way["devices"]): way for way in result["ways"]}
    assert variants["one device", 1]["speed_up"]["median"] == 1
    assert all(len(way["rounds"]) == 2 and way["samples_per_second"]["median"] > 0 for way in variants.values())
    assert all(way["memory_peak_bytes"] is None for way in variants.values())
    # Neither the number of devices nor the way of adding copies changes the evaluation.
    alone, several = variants["exact", 1], variants["ddp, exact", 2]
    assert alone["evaluation"] == several["evaluation"]
    assert variants["fsdp", 2]["processes"] == 2
    assert json.loads((tmp_path / "output/bench.json").read_text())["ways"] == result["ways"]


@pytest.mark.long
@pytest.mark.slow
def test_variants_that_cannot_run_are_listed_and_the_rest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("digits", "--devices", "2", "--layout", "tp", "--epochs", 0, "--rounds", 1, "--steps", 1)
    result = run_bench(capsys, tmp_path, *options, "batch_size=4", "microbatches=4")
    reasons = {absent["name"]: absent["reason"] for absent in result["not_run"]}
    assert "ddp, 4 parts" not in reasons
    assert "no built-in plan" in reasons["tp"]
    assert {way["name"] for way in result["ways"]} >= {"one device", "ddp", "ddp, bf16"}
    assert all(not way["evaluation"] for way in result["ways"])


@pytest.mark.long
def test_stopped_comparison_leaves_no_files(tmp_path: Path) -> None:
    options = ("--devices", 1, "--ways", "accumulate", "--accumulate", "2", "--epochs", 0, "--rounds", 200)
    with Running("bench", "digits", *options, "--steps", 5, "batch_size=240", cwd=tmp_path) as running:
        running.until(lambda: "timing, round 2" in running.errors, "a round")
        running.kill_group(signal.SIGINT)
        done = running.wait(60)
    assert done.code == EXIT_STOPPED, done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--devices 0", "E_VALUE"),
        ("--devices two", "E_VALUE"),
        ("--epochs -1", "E_VALUE"),
        ("--layout fdsp", "E_VALUE"),
        ("--layout hsdp:sharp=2", "E_MESH"),
        ("--ways ddp,sync-bn", "E_VALUE"),
        ("--accumulate 0,2", "E_VALUE"),
        ("--workers -1", "E_VALUE"),
        ("--lr --layout fsdp", "E_OPTION_CONFLICT"),
    ],
)
def test_invalid_input_creates_no_files(refused: Callable[..., str], arguments: str, code: str) -> None:
    assert f"[{code}]" in refused("bench", "digits", *arguments.split())


@pytest.mark.slow
def test_learning_rate_does_not_depend_on_the_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [run_bench(capsys, tmp_path, "digits", "--lr", "--steps", 40, "--devices", count) for count in (1, 2)]
    assert found[0]["lr"] == found[1]["lr"]
    assert 1e-3 < found[0]["lr"] < 1
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-5)
    assert not list(tmp_path.iterdir())
