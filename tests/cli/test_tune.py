"""Tests of `samestep tune`: the setting is saved, used by training, and changes no result."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.started import as_torchrun, free_port, ranks
from helpers.system import Running, answer, environment, events, here, samestep, until, weights
from samestep.errors import EXIT_DIFFERS, EXIT_DONE, EXIT_INPUT, EXIT_STOPPED

RECIPE = Path(__file__).parents[1] / "helpers" / "tuned.yaml"
SMALL = ("--try", "none", "--workers", "0,1", "--prefetch", "2", "--seconds", "0.02", "--no-picture")
TWO = ("--processes", 2)


def run_tune(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> Any:
    assert here("tune", RECIPE, *SMALL, *arguments, "--json", cwd=folder) == EXIT_DONE
    return answer(capsys)


def last_environment(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / "runs" / name / "environment.json").read_text(encoding="utf-8"))[-1])


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()


@pytest.mark.slow
def test_setting_is_used_by_training_and_changes_no_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_tune(capsys, tmp_path, *TWO)
    file = Path(result["folder"], "tune.json")
    assert json.loads((tmp_path / file).read_text(encoding="utf-8"))["choice"] == result["choice"]
    assert result["memory"]["fits"]
    assert result["place"]["processes"] == 2
    assert result["settings"][0]["samples_per_second"]["median"] > 0
    # The chosen setting varies; this one is certainly not the default.
    changed = {**result, "choice": {"workers": 1, "prefetch": 3}}
    (tmp_path / file).write_text(json.dumps(changed), encoding="utf-8")
    assert here("train", RECIPE, *TWO, "--name", "tuned", cwd=tmp_path) == EXIT_DONE
    line = f"workers 1, prefetch 3: tuned on this machine, {file}; --no-tuned leaves it"
    assert line in [event["text"] for event in events(tmp_path / "runs/tuned", "note")]
    facts = last_environment(tmp_path, "tuned")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (1, 3, str(file))
    assert here("train", RECIPE, *TWO, "--name", "plain", "--no-tuned", cwd=tmp_path) == EXIT_DONE
    facts = last_environment(tmp_path, "plain")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (0, 2, None)
    assert not [event for event in events(tmp_path / "runs/plain", "note") if "tuned" in event["text"]]
    assert weights(tmp_path / "runs/tuned") == weights(tmp_path / "runs/plain")


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the file of a setting of two workers for two ranks."""
    result = run_tune(capsys, tmp_path, *TWO)
    path = tmp_path / result["folder"] / "tune.json"
    path.write_text(json.dumps({**result, "choice": {"workers": 2, "prefetch": 1}}), encoding="utf-8")
    return path


@pytest.mark.slow
def test_options_override_the_setting_and_resume_uses_it(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("train", RECIPE, *TWO, "--name", "options", "--workers", 1, cwd=tmp_path) == EXIT_DONE
    assert (last_environment(tmp_path, "options")["workers"], last_environment(tmp_path, "options")["tuned"]) == (
        1,
        None,
    )
    assert here("resume", "runs/options", *TWO, cwd=tmp_path) == EXIT_DONE
    assert (last_environment(tmp_path, "options")["workers"], last_environment(tmp_path, "options")["prefetch"]) == (
        2,
        1,
    )
    assert here("resume", "runs/options", "--processes", 3, cwd=tmp_path) == EXIT_DONE
    assert last_environment(tmp_path, "options")["tuned"] is None


@pytest.mark.slow
def test_outdated_or_damaged_file_is_reported_and_ignored(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "batch_size=32")
    assert here("train", RECIPE, *TWO, *change, "--name", "outdated", cwd=tmp_path) == EXIT_DONE
    assert "is ignored: the recipe has changed (batch_size: 16 -> 32)" in capsys.readouterr().err
    assert last_environment(tmp_path, "outdated")["tuned"] is None
    saved.write_text("{", encoding="utf-8")
    assert here("train", RECIPE, *TWO, "--name", "damaged", cwd=tmp_path) == EXIT_DONE
    assert "is ignored: it cannot be read" in capsys.readouterr().err
    assert last_environment(tmp_path, "damaged")["tuned"] is None


@pytest.mark.slow
def test_slow_data_gets_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ("--workers", "0,4", "--set", "data.options.seconds=0.02", "data.options.samples=256")
    result = run_tune(capsys, tmp_path, *TWO, *change)
    assert result["choice"]["workers"] == 4
    assert result["settings"][0]["data_share"] > 0.3


@pytest.mark.long
def test_slow_rank_gets_fewer_microbatches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The data of rank 1 take longer, with samples that one process loads: real time, measured by the trials."""
    options = ("--workers", "0", "--set", "microbatches=8", "data.options.samples=256")
    slow = ("data.options.seconds=0.02", "data.options.slow_rank=1")
    shares = run_tune(capsys, tmp_path, *TWO, *options, *slow)["shares"]
    assert shares["speeds"][0] > 1.5 * shares["speeds"][1]
    assert shares["proposed"][0] > 4 > shares["proposed"][1] >= 1
    assert sum(shares["proposed"]) == 8
    assert shares["times_as_fast"]["median"] > 1.05
    equal = run_tune(capsys, tmp_path, *TWO, *options, "data.options.seconds=0.02")["shares"]
    assert equal["proposed"] is None
    assert equal["speeds"][0] == pytest.approx(equal["speeds"][1], rel=0.4)
    alone = run_tune(capsys, tmp_path, *options)["shares"]
    assert (alone["proposed"], alone["speeds"]) == (None, [])


@pytest.mark.slow
def test_numbers_of_workers_that_fail_are_listed_and_the_rest_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = ("--workers", "0,1,2,4", "--set", "data.options.seconds=0.01", "data.options.most_workers=1")
    result = run_tune(capsys, tmp_path, *TWO, *failing)
    assert {setting["workers"] for setting in result["settings"]} <= {0, 1}
    (absent,) = result["not_run"]
    assert absent["workers"] == 2
    assert "worker" in absent["reason"]


@pytest.mark.long
@pytest.mark.slow
def test_ranks_of_another_launcher_use_the_setting(tmp_path: Path, saved: Path) -> None:
    path = {"PYTHONPATH": environment()["PYTHONPATH"]}
    with ranks(as_torchrun(free_port()), 2, "train", RECIPE, "--name", "launched", cwd=tmp_path, more=path) as started:
        done = started.wait()
    assert [each.code for each in done] == [EXIT_DONE] * 2, done
    facts = last_environment(tmp_path, "launched")
    assert (facts["workers"], facts["prefetch"], facts["tuned"]) == (2, 1, str(saved.relative_to(tmp_path)))


@pytest.mark.long
@pytest.mark.slow
def test_options_that_change_bits_are_reported_and_not_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_tune(capsys, tmp_path, "--processes", 1, "--try", "threads,channels-last")
    times = {rule["key"]: rule["times_as_fast"] or rule["reason"] for rule in result["rules"]}
    assert set(times) == {"step.threads", "step.channels_last"}
    assert times["step.channels_last"]["median"] > 0
    assert set(result["choice"]) == {"workers", "prefetch"}


@pytest.mark.slow
def test_option_that_cannot_run_is_reported_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ("--try", "compile", "--set", "step.batch_norm=sync")
    result = run_tune(capsys, tmp_path, "--processes", 1, *change)
    (rule,) = result["rules"]
    assert rule["times_as_fast"] is None
    assert "step.compile with step.batch_norm: sync" in rule["reason"]


@pytest.mark.long
@pytest.mark.slow
def test_microbatches_that_do_not_fit_are_reported_and_no_file_remains(tmp_path: Path) -> None:
    # Activations of 8 images take 128 MiB per layer, and several layers are in memory at once.
    big = ("--set", "data.options.size=256", "model.options.width=64", "batch_size=16", "microbatches=2")
    before = shared_memory()
    with Running("tune", RECIPE, *SMALL, *TWO, *big, "--memory", "1GiB", "--json", cwd=tmp_path) as running:
        done = running.wait(100)
        until(lambda: not running.processes(), "no process remains", 30)
    assert done.code == EXIT_DIFFERS, done.err
    memory = json.loads(done.out)["memory"]
    assert not memory["fits"]
    assert memory["microbatches_that_fit"] in (4, 8, 16)
    assert [attempt["fits"] for attempt in memory["tried"]][-1]
    assert memory["changes"] == [
        f"batch norm is over {16 // memory['microbatches_that_fit']} instead of 8 samples",
        "dropout uses other masks",
    ]
    assert "memory" in memory["message"]
    assert not list(tmp_path.iterdir())
    assert shared_memory() <= before


@pytest.mark.slow
def test_memory_limit_below_the_current_use_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("tune", RECIPE, *SMALL, "--memory", "10MiB", cwd=tmp_path) == EXIT_INPUT
    assert "E_MEMORY_LIMIT" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_leaves_no_processes_or_files(tmp_path: Path) -> None:
    slow = ("--set", "data.options.seconds=0.05", "data.options.samples=512")
    before = shared_memory()
    with Running("tune", RECIPE, *SMALL, "--workers", "1,2,4", "--seconds", 2, *TWO, *slow, cwd=tmp_path) as running:
        # At 2 workers per rank: a stop between the memory check and the search would end in another way.
        running.until(lambda: len(running.processes()) >= 8, "workers run")
        running.kill_group(signal.SIGINT)
        done = running.wait(60)
        until(lambda: not running.processes(), "no process remains", 30)
    assert done.code == EXIT_STOPPED, done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())
    assert shared_memory() <= before


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_invalid_input_creates_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert here("tune", RECIPE, *arguments, cwd=tmp_path) == EXIT_INPUT
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(tmp_path: Path) -> None:
    assert "example: samestep tune digits" in samestep("tune", "--help", cwd=tmp_path).out
