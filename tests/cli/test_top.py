"""`samestep top`: state of a run of several processes from before its start to its end."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.system import Running, answer, here, samestep, tree, until
from helpers.terminal import open_terminal

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
ROW = re.compile(r"^ *(\d+) +(\d+) +\d+ +\d+% ")


def status_of(run: str, cwd: Path) -> dict[str, Any]:
    done = samestep("top", run, "--json", cwd=cwd)
    assert done.code == 0, done.err
    status: dict[str, Any] = json.loads(done.out)
    return status


@pytest.mark.slow
def test_four_ranks_from_before_their_start(tmp_path: Path) -> None:
    run, hold = tmp_path / "runs" / "a", tmp_path / "hold"
    hold.write_text("2 12", encoding="utf-8")  # rank 2 stops in step 12
    with open_terminal(100) as terminal, Running("top", "runs/a", cwd=tmp_path, terminal=terminal.slave) as top:
        terminal.wait_for(r"^waiting for runs/a$", "the wait for the run")
        with Running("train", RECIPE, "--processes", 4, "--name", "a", cwd=tmp_path) as train:
            terminal.wait_for(r"^ +2 .* in step 12", "the activity of rank 2")
            for rank in (0, 1, 3):
                terminal.wait_for(rf"^ +{rank} .* in step 12, waiting", "the ranks that wait for rank 2")
            top.must_run()
            status = status_of("runs/a", tmp_path)
            assert (status["state"], status["epoch"], status["step"], status["steps"]) == ("running", 1, 11, 39)
            assert [row["sign"] for row in status["ranks"]] == ["active"] * 4
            assert [row["line"]["waits"] for row in status["ranks"]] == [True, True, False, True]
            hold.unlink()
            assert train.wait(60).code == 0
        terminal.wait_for(r"^runs/a  ended  epoch 3/3  step 39/39", "the end")
        before = tree(run)
        top.kill(signal.SIGINT)
        assert top.wait(10).code == 0
    assert tree(run) == before
    frames = [[line for line in frame.splitlines() if ROW.match(line)] for frame in terminal.frames()]
    assert max(map(len, frames)) == 4, "a row appears twice"
    assert all(len(line) <= 100 for frame in terminal.frames() for line in frame.splitlines())
    steps = [int(ROW.match(rows[0])[2]) for rows in frames if rows]  # type: ignore[index]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_killed_run(tmp_path: Path) -> None:
    (tmp_path / "hold").write_text("0 8", encoding="utf-8")
    with Running("train", RECIPE, "--processes", 2, "--name", "a", cwd=tmp_path) as train:
        lines = tmp_path / "runs" / "a" / "ranks" / "rank-0.jsonl"
        train.until(lambda: lines.exists() and "in step" in lines.read_text("utf-8"), "the stopped step")
        status = status_of("runs/a", tmp_path)
        assert status["state"] == "running"
        for process in train.processes():
            train.try_kill_process(process, signal.SIGKILL)
        until(lambda: not train.processes(), "the end of all processes", 30)
    # A process that was killed can hold the lock for a moment.
    until(lambda: status_of("runs/a", tmp_path)["state"] == "dead", "the end of the run", 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("top")
    assert here("train", RECIPE, "--name", "a", "--processes", 4, "epochs=1", cwd=folder) == 0
    return folder


def test_output_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("top", "runs/a", cwd=folder) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/a  ended  epoch 1/1 ")
    assert "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["0", "1", "2", "3"]
    assert here("top", "runs/a", "--once", cwd=folder) == 0
    again = capsys.readouterr().out
    assert re.sub(r" +\d+ s ", "", again) == re.sub(r" +\d+ s ", "", out)


def test_run_resumed_with_fewer_ranks_has_fewer_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [(folder / "runs" / "a" / "ranks" / f"rank-{rank}.jsonl").read_bytes() for rank in range(4)]
    assert here("resume", "runs/a", "--processes", 3, cwd=folder) == 0
    after = [(folder / "runs" / "a" / "ranks" / f"rank-{rank}.jsonl").read_bytes() for rank in range(4)]
    assert [len(new) > len(old) and new.startswith(old) for new, old in zip(after, before, strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    capsys.readouterr()
    assert here("top", "runs/a", "--json", cwd=folder) == 0
    status = answer(capsys)
    assert [row["rank"] for row in status["ranks"]] == [0, 1, 2]
    assert (status["state"], status["step"]) == ("ended", 13)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["runs"], "runs is not a run"), (["runs/none", "--once"], "runs/none is not a run")]
)
def test_invalid_input(refused: Callable[..., str], tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "runs").mkdir()
    assert refused("top", *arguments).startswith(f"error: {message}")


def test_top_does_not_import_torch(folder: Path) -> None:
    from test_architecture import loaded_by

    loaded = loaded_by(
        "import contextlib, io\nfrom samestep.cli.main import main\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert main(['top', '{folder}/runs/a', '--json']) == 0"
    )
    assert "samestep.tools.top" in loaded
    assert "torch" not in loaded
