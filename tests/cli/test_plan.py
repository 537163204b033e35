"""Tests of `samestep plan`: layouts with step time and memory, the choice, the curve, and invalid input."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.system import Running, answer, here, until
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_INPUT, EXIT_STOPPED

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
SHORT = ("--device", "cpu", "--seconds", "0.05", "--no-picture")


def run_plan(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object, code: int = EXIT_DONE) -> Any:
    assert here("plan", *arguments, *SHORT, "--json", cwd=folder) == code
    return answer(capsys)


@pytest.mark.slow
def test_layouts_of_four_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_plan(capsys, tmp_path, "digits", "--devices", 4, "--memory", "24GB", "--out", "planned")
    rows = {row["name"]: row for row in result["layouts"]}
    assert {"ddp", "fsdp", "pp"} <= set(rows)
    assert {row["strategy"] for row in result["layouts"]} == {"ddp", "fsdp", "hsdp", "pp"}
    # The model has no matrix products with a plan.
    assert {layout["name"].partition(" (")[0] for layout in result["infeasible"]} >= {"tp", "ddp x tp", "pp x tp"}
    for row in rows.values():
        assert 0 < row["step_seconds"] < 60
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"])
        assert 100 << 20 < row["memory"]["total"] < 2 << 30
        assert row["fits"]
        assert row["is_exact"]
    assert rows["fsdp"]["memory"]["optimizer"] == pytest.approx(rows["ddp"]["memory"]["optimizer"] / 4)
    times = [row["step_seconds"] for row in result["layouts"]]
    assert times == sorted(times)
    assert (result["chosen"], result["runner_up"]) == tuple(row["name"] for row in result["layouts"][:2])
    assert result["curve"][-1]["devices"] == 8192
    calibration = result["calibration"]
    assert set(calibration["steps"]) == {"1", "2", "4", "8"}
    assert set(calibration["overheads"]) == {"ddp", "fsdp", "pp"}
    assert {name for name, row in rows.items() if row["is_measured"]} >= {"ddp", "fsdp", "pp"}
    assert {name: rows[name]["step_seconds"] for name in calibration["measured"]} == pytest.approx(
        calibration["measured"]
    )
    saved = json.loads((tmp_path / "planned" / "plan.json").read_text(encoding="utf-8"))
    assert saved["layouts"] == result["layouts"]


@pytest.mark.slow
def test_one_device_without_enough_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("digits", "--devices", 1, "--memory", "10MB")
    result = run_plan(capsys, tmp_path, *arguments, code=EXIT_DIFFERS)
    assert [row["fits"] for row in result["layouts"]] == [False]
    assert (result["chosen"], result["runner_up"], result["curve"]) == (None, None, [])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--devices", 0), "E_VALUE"),
        (("--devices", 4, "--memory", "much"), "E_SIZE"),
        (("--devices", 4, "--link", "fast"), "E_VALUE"),
        (("--devices", 4, "--link", "0Gbit"), "E_VALUE"),
        (("--devices", 4, "--nodes", 3), "E_VALUE"),
        (("--devices", 4, "--mtbf", -1), "E_VALUE"),
        (("--devices", 4, "--restart", "soon"), "E_DURATION"),
        (("--devices", 4, "--memory", 0), "E_SIZE"),
        (("--devices", 4, "--out", "/proc/plan"), "E_OUTPUT"),
    ],
)
def test_invalid_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], code: str
) -> None:
    assert here("plan", "digits", *arguments, *SHORT, cwd=tmp_path) == EXIT_INPUT
    assert f"[{code}]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_number_of_devices_without_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A prime number of devices has no pipeline of this model's layers, slices or ranks with microbatches.
    arguments = ("digits", "--devices", 10007, "--set", "step.batch_norm=sync")
    assert here("plan", *arguments, *SHORT, cwd=tmp_path) == EXIT_INPUT
    assert "[E_MESH]" in capsys.readouterr().err


def test_script_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    assert here("plan", "train.py", "--devices", 2, *SHORT, cwd=tmp_path) == EXIT_INPUT
    assert "[E_SCRIPT]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ctrl_c_while_one_rank_computes_ends_all(tmp_path: Path, rank: int) -> None:
    """Rank 0 computes alone first; later rank 1 is held, and rank 0 waits for its time."""
    hold, held = tmp_path / "hold", 6
    hold.write_text(f"{rank} {held}", encoding="utf-8")

    def is_held() -> bool:
        seen = list(tmp_path.glob(f"seen-{rank}-*"))
        return len(seen) == 1 and seen[0].read_text(encoding="utf-8").count("\n") == held

    with Running("plan", RECIPE, "--devices", 2, "--out", "planned", *SHORT, cwd=tmp_path) as running:
        running.until(is_held, "the rank is held")
        time.sleep(0.5)  # the other rank reaches its wait
        running.kill_group(signal.SIGINT)
        time.sleep(0.2)
        hold.unlink()
        done = running.wait(20)
        until(lambda: not running.processes(), "no process remains", 10)
    assert done.code == EXIT_STOPPED, done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "planned").exists()
