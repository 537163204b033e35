"""`samestep tune`: what it finds is written down, taken up by who trains, and changes no result."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_INPUT, EXIT_STOPPED
from started import as_torchrun, free_port, ranks
from system import Running, answer, environment, events, here, samestep, until, weights

RECIPE = Path(__file__).parents[1] / "tuned.yaml"
SMALL = ("--try", "none", "--workers", "0,1", "--prefetch", "2", "--seconds", "0.02", "--no-picture")
TWO = ("--processes", 2)


def tuned(capsys: pytest.CaptureFixture[str], place: Path, *arguments: object) -> Any:
    assert here("tune", RECIPE, *SMALL, *arguments, "--json", cwd=place) == EXIT_DONE
    return answer(capsys)


def facts_of(place: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((place / "runs" / name / "environment.json").read_text(encoding="utf-8"))[-1])


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()


def test_what_it_finds_is_taken_up_and_changes_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned(capsys, tmp_path, *TWO)
    file = Path(found["folder"], "tune.json")
    assert json.loads((tmp_path / file).read_text(encoding="utf-8"))["choice"] == found["choice"]
    assert found["memory"]["fits"]
    assert found["place"]["processes"] == 2
    assert found["settings"][0]["samples_per_second"]["median"] > 0
    # Whatever was the fastest just now: what is written is what is taken up.
    said = {**found, "choice": {"workers": 1, "prefetch": 3}}
    (tmp_path / file).write_text(json.dumps(said), encoding="utf-8")
    assert here("train", RECIPE, *TWO, "--name", "tuned", cwd=tmp_path) == EXIT_DONE
    line = f"workers 1, prefetch 3: tuned on this machine, {file}; --no-tuned leaves it"
    assert [event["text"] for event in events(tmp_path / "runs/tuned", "note")] == [line]
    facts = facts_of(tmp_path, "tuned")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (1, 3, str(file))
    assert here("train", RECIPE, *TWO, "--name", "plain", "--no-tuned", cwd=tmp_path) == EXIT_DONE
    facts = facts_of(tmp_path, "plain")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (0, 2, None)
    assert not events(tmp_path / "runs/plain", "note")
    assert weights(tmp_path / "runs/tuned") == weights(tmp_path / "runs/plain")


@pytest.fixture
def kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A choice of two workers for two ranks; its file."""
    found = tuned(capsys, tmp_path, *TWO)
    path = tmp_path / found["folder"] / "tune.json"
    path.write_text(json.dumps({**found, "choice": {"workers": 2, "prefetch": 1}}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_options_win_and_resume_takes_it_up_too(tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("train", RECIPE, *TWO, "--name", "said", "--workers", 1, cwd=tmp_path) == EXIT_DONE
    assert (facts_of(tmp_path, "said")["workers"], facts_of(tmp_path, "said")["tuned"]) == (1, None)
    assert here("resume", "runs/said", *TWO, cwd=tmp_path) == EXIT_DONE
    assert (facts_of(tmp_path, "said")["workers"], facts_of(tmp_path, "said")["prefetch"]) == (2, 1)
    assert here("resume", "runs/said", "--processes", 3, cwd=tmp_path) == EXIT_DONE
    assert facts_of(tmp_path, "said")["tuned"] is None


@pytest.mark.slow
def test_what_is_stale_or_broken_is_told_and_not_used(
    tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "batch_size=32")
    assert here("train", RECIPE, *TWO, *change, "--name", "stale", cwd=tmp_path) == EXIT_DONE
    assert "is not used: it was found for another recipe (batch_size: 16 -> 32)" in capsys.readouterr().err
    assert facts_of(tmp_path, "stale")["tuned"] is None
    kept.write_text("{", encoding="utf-8")
    assert here("train", RECIPE, *TWO, "--name", "broken", cwd=tmp_path) == EXIT_DONE
    assert "is not used: it cannot be read" in capsys.readouterr().err
    assert facts_of(tmp_path, "broken")["tuned"] is None


@pytest.mark.slow
def test_data_that_waits_gets_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ("--workers", "0,4", "--set", "data.options.seconds=0.02", "data.options.samples=256")
    found = tuned(capsys, tmp_path, *TWO, *change)
    assert found["choice"]["workers"] == 4
    assert found["settings"][0]["data_share"] > 0.3


@pytest.mark.slow
def test_numbers_of_workers_that_cannot_run_are_told_and_the_rest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks = ("--workers", "0,1,2,4", "--set", "data.options.seconds=0.01", "data.options.most_workers=1")
    found = tuned(capsys, tmp_path, *TWO, *breaks)
    assert {setting["workers"] for setting in found["settings"]} <= {0, 1}
    (absent,) = found["not_run"]
    assert absent["workers"] == 2
    assert "worker" in absent["reason"]


@pytest.mark.slow
def test_ranks_of_another_launcher_take_it_up(tmp_path: Path, kept: Path) -> None:
    path = {"PYTHONPATH": environment()["PYTHONPATH"]}
    with ranks(as_torchrun(free_port()), 2, "train", RECIPE, "--name", "launched", cwd=tmp_path, more=path) as started:
        done = started.wait()
    assert [each.code for each in done] == [EXIT_DONE] * 2, done
    facts = facts_of(tmp_path, "launched")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (2, 1, str(kept.relative_to(tmp_path)))


@pytest.mark.slow
def test_what_would_change_bits_is_told_and_not_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned(capsys, tmp_path, "--processes", 1, "--try", "threads,channels-last")
    times = {rule["key"]: rule["times_as_fast"] or rule["reason"] for rule in found["rules"]}
    assert set(times) == {"step.threads", "step.channels_last"}
    assert times["step.channels_last"]["median"] > 0
    assert set(found["choice"]) == {"workers", "prefetch"}


@pytest.mark.slow
def test_what_cannot_be_tried_is_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ("--try", "compile", "--set", "step.batch_norm=sync")
    found = tuned(capsys, tmp_path, "--processes", 1, *change)
    (rule,) = found["rules"]
    assert rule["times_as_fast"] is None
    assert "step.compile with step.batch_norm: sync" in rule["reason"]


@pytest.mark.slow
def test_shards_that_do_not_fit_are_told_with_those_that_would_and_nothing_stays(tmp_path: Path) -> None:
    # Activations of 8 images in a shard take 128 MiB each, and several of them live at once.
    big = ("--set", "data.options.size=256", "model.options.width=64", "batch_size=16", "shards=2")
    before = shared_memory()
    with Running("tune", RECIPE, *SMALL, *TWO, *big, "--memory", "1GiB", "--json", cwd=tmp_path) as running:
        done = running.wait(100)
        until(lambda: not running.processes(), "no process is left", 30)
    assert done.code == EXIT_DIFFERS, done.err
    memory = json.loads(done.out)["memory"]
    assert not memory["fits"]
    assert memory["shards_that_fit"] in (4, 8, 16)
    assert [each["fits"] for each in memory["tried"]][-1]
    assert memory["changes"] == [
        f"batch norm is over {16 // memory['shards_that_fit']} samples in place of 8",
        "dropout draws other masks",
    ]
    assert "memory" in memory["said"]
    assert not list(tmp_path.iterdir())
    assert shared_memory() <= before


@pytest.mark.slow
def test_less_memory_than_a_rank_has_taken_already_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("tune", RECIPE, *SMALL, "--memory", "10MiB", cwd=tmp_path) == EXIT_INPUT
    assert "before it has a model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    slow = ("--set", "data.options.seconds=0.05", "data.options.samples=512")
    before = shared_memory()
    with Running("tune", RECIPE, *SMALL, "--workers", "1,2,4", *TWO, *slow, cwd=tmp_path) as running:
        running.until(lambda: len(running.processes()) >= 6, "workers run")
        running.kill_group(signal.SIGINT)
        done = running.wait(60)
        until(lambda: not running.processes(), "no process is left", 30)
    assert done.code == EXIT_STOPPED, done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())
    assert shared_memory() <= before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--workers", "two"), "--workers two"),
        (("--workers", "-1"), "--workers -1"),
        (("--prefetch", "0"), "--prefetch 0"),
        (("--try", "magic"), "--try magic"),
        (("--seconds", "0"), "--seconds 0"),
        (("--seconds", "nan"), "--seconds nan"),
        (("--memory", "much"), "--memory much"),
        (("--processes", "1:2"), "--processes 1:2"),
        (("--processes", "99"), "99"),
        (("--set", "batch=3"), "batch"),
    ],
)
def test_wrong_input_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert here("tune", RECIPE, *arguments, cwd=tmp_path) == EXIT_INPUT
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(tmp_path: Path) -> None:
    assert "example: samestep tune digits" in samestep("tune", "--help", cwd=tmp_path).out
