"""`samestep replay` and `samestep diff` on runs of scripts, whose directories are only read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.system import here, tree
from samestep.errors import EXIT_DIFFERS

SCRIPT = Path(__file__).parents[1] / "helpers" / "replayed_loop.py"
LAST = 12

Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one script with the script: with checkpoints, without, with other arguments, and with a fault."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copy(SCRIPT, folder / "train.py")
    assert here("run", "--processes", 2, "train.py", "saved", True, cwd=folder) == 0
    for name in ("unsaved", "other"):
        assert here("run", "--processes", 1, "train.py", name, False, cwd=folder) == 0
    assert here("run", "--processes", 1, "train.py", "coarse", True, 5, cwd=folder) == 0
    (folder / "fault").touch()
    assert here("run", "--processes", 1, "train.py", "faulty", False, cwd=folder) == 0
    (folder / "fault").unlink()
    return folder


@pytest.fixture
def report(folder: Path, capfd: pytest.CaptureFixture[str]) -> Report:
    """Return a function that runs a command with `--json`, and returns code and data; no run may change."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        before = tree(folder / "runs")
        capfd.readouterr()
        code = here(*arguments, "--json", cwd=folder)
        assert tree(folder / "runs") == before
        output = capfd.readouterr()
        assert output.out, output.err
        return code, json.loads(output.out)

    return run


@pytest.mark.slow
def test_steps_of_a_script_are_replayed_from_its_checkpoint(report: Report) -> None:
    code, data = report("replay", "runs/saved", "--step", 11, "--trust")
    assert (code, data["equal"], data["from_step"], data["compared"], data["processes"]) == (0, True, 8, 3, 2)
    assert data["checksum"] == data["logged"]
    assert "value of 0.weight" in data["tensors"]
    # A checkpoint of the step itself leaves nothing to compute, and the last step ends the script.
    code, again = report("replay", "runs/saved", "--step", LAST, "--trust", "--processes", 1)
    assert (code, again["from_step"], again["compared"], again["processes"]) == (0, 8, 4, 1)
    code, begun = report("replay", "runs/saved", "--step", 2, "--trust", "--processes", 1)
    assert (code, begun["from_step"], begun["compared"]) == (0, 0, 2)
    code, coarse = report("replay", "runs/coarse", "--step", 11, "--trust")
    assert (code, coarse["from_step"], coarse["compared"], coarse["logged"]) == (0, 8, 1, None)
    code, whole = report("replay", "runs/saved", "--step", 11, "--trust", "--processes", 1, "--from-start")
    assert (code, whole["from_step"], whole["tensors"]) == (0, 0, data["tensors"])


@pytest.mark.long
def test_script_without_checkpoints_starts_from_the_beginning(report: Report) -> None:
    code, data = report("replay", "runs/unsaved", "--step", 5, "--trust")
    assert (code, data["equal"], data["from_step"], data["compared"]) == (0, True, 0, 5)
    code, data = report("replay", "runs/faulty", "--step", 8, "--trust")
    assert (code, data["equal"], data["first_different"]) == (3, False, 7)


@pytest.mark.slow
def test_diff_finds_the_first_different_step_of_scripts(report: Report) -> None:
    code, data = report("diff", "runs/saved", "runs/unsaved", "--trust")
    assert (code, data["equal"], data["compared"]) == (0, True, LAST)
    code, data = report("diff", "runs/saved", "runs/faulty", "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 6, 7)
    lines = data["finding"]["replays"]
    assert lines[0] == "runs/saved, steps 5 to 7 on 2 processes: has the logged checksums"
    assert lines[1] == "runs/faulty, steps 1 to 7 on 1 process: differs from the log from step 7 on"


@pytest.mark.long
def test_first_different_tensor_of_scripts_is_located(report: Report) -> None:
    code, data = report("diff", "runs/saved", "runs/other", "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 6, 7)
    finding = data["finding"]
    assert (finding["step"], finding["tensor"]) == (7, "2.bias")
    assert all(line.endswith("has the logged checksums") for line in finding["replays"])


@pytest.mark.slow
def test_changed_script_is_named(folder: Path, refused: Callable[..., str]) -> None:
    script = folder / "train.py"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("lr=0.01", "lr=0.02"), encoding="utf-8")
    try:
        message = refused("replay", folder / "runs" / "saved", "--step", 3, "--trust", "--json")
        assert "[E_CODE_CHANGED]" in message
        assert "train.py" in message
        accepted = ("replay", "runs/saved", "--step", 3, "--trust", "--accept-changes")
        assert here(*accepted, cwd=folder) == EXIT_DIFFERS
    finally:
        script.write_text(text, encoding="utf-8")


@pytest.mark.long
def test_replay_contains_a_logged_checksum(report: Report) -> None:
    """Checksums of steps 5 and 10 are logged: the replay of step 9 begins at the checkpoint of step 4, not of 8."""
    code, data = report("replay", "runs/coarse", "--step", 9, "--trust")
    assert (code, data["from_step"], data["compared"], data["logged"]) == (0, 4, 1, None)


@pytest.mark.slow
def test_step_before_the_first_checksum_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    message = refused("replay", folder / "runs" / "coarse", "--step", 3, "--trust", "--json")
    assert "the first one is that of step 5 [E_NO_CHECKSUM]" in message
    assert "samestep.start(checksum_every=1)" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved", pytest.param("unsaved", marks=pytest.mark.long)])
def test_a_step_after_the_end_is_refused_with_the_last_step(
    folder: Path, refused: Callable[..., str], name: str
) -> None:
    message = refused("replay", folder / "runs" / name, "--step", 600, "--trust", "--json")
    assert f"which has {LAST} steps" in message
    assert f"--step {LAST} or less" in message


@pytest.mark.slow
def test_refusals(folder: Path, refused: Callable[..., str]) -> None:
    run, step = folder / "runs" / "unsaved", ("--step", 3)
    assert "[E_UNTRUSTED]" in refused("replay", run, *step)
    assert "[E_OPTION_CONFLICT]" in refused("replay", run, *step, "--trust", "--strategy", "fsdp")
    assert "[E_SCRIPT]" in refused("replay", run, *step, "--trust", "--out", folder / "out")
    moved = folder / "moved"
    shutil.copytree(run, moved)
    starts = json.loads((moved / "environment.json").read_text(encoding="utf-8"))
    for changes in ({"started_as": "function"}, {"script": "missing.py"}, {"arguments": None}):
        (moved / "environment.json").write_text(json.dumps([{**starts[-1], **changes}]), encoding="utf-8")
        assert "[E_SCRIPT]" in refused("replay", moved, *step, "--trust")
