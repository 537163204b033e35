"""`samestep diff` on runs of recipes, whose directories are only read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import read_calls
from helpers.system import TESTS, events, here, tree, weights
from samestep.errors import EXIT_INPUT

RECIPE = TESTS / "helpers" / "recorded.yaml"
FLIPPING = ("optimizer.name=helpers.flipping:FlippingAdamW", "optimizer.options={lr: 0.01}")

Report = Callable[..., tuple[int, dict[str, Any]]]


def train(folder: Path, name: str, *overrides: str, options: tuple[object, ...] = (), every: int = 1) -> Path:
    arguments = ("--name", name, "--checksum-every", every, *options, "epochs=1", *overrides)
    assert here("train", RECIPE, *arguments, cwd=folder) == 0
    return folder / "runs" / name


@pytest.fixture
def report(capfd: pytest.CaptureFixture[str]) -> Report:
    """Return a function that runs the command with `--json`, and returns code and data; no run may change."""

    def run(folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
        before = tree(folder / "runs")
        capfd.readouterr()
        code = here("diff", *arguments, "--json", cwd=folder)
        assert tree(folder / "runs") == before
        output = capfd.readouterr()
        assert output.out, output.err
        return code, json.loads(output.out)

    return run


def replay_of(data: dict[str, Any], number: int = 0) -> tuple[Any, ...]:
    """Return the step of the checkpoint, the number of ranks and the compared and first different checksums."""
    replayed = data["replays"][number]
    return tuple(replayed[key] for key in ("first", "processes", "compared", "first_different"))


@pytest.mark.slow
def test_equal_runs_and_a_run_with_another_seed(tmp_path: Path, report: Report) -> None:
    one = train(tmp_path, "one")
    other = train(tmp_path, "other", options=("--processes", 2))
    code, data = report(tmp_path, one, other, "--trust")
    assert (code, data["equal"], data["first_different"], data["compared"]) == (0, True, None, 13)
    assert data["recipe"] == []
    assert "processes: 1 -> 2" in data["environment"]
    seeded = train(tmp_path, "seeded", "step.seed=1")
    code, data = report(tmp_path, one, seeded)
    assert (code, data["equal"], data["first_different"]) == (3, False, 1)
    assert data["recipe"] == ["step.seed: 0 -> 1"]
    assert data["finding"] is None
    code, data = report(tmp_path, other, "--step", 9, "--trust", "--processes", 3)
    assert (code, data["equal"], *replay_of(data)) == (0, True, 0, 3, 9, None)
    assert data["replays"][0]["checksums"]["9"] == events(one, "checksum")[8]["checksum"]
    code, data = report(tmp_path, one, seeded, "--step", 2, "--trust")
    assert (code, data["finding"]["step"]) == (3, 2)
    assert data["finding"]["text"] == f"step 2, state after the step: {data['finding']['tensor']}"


@pytest.mark.slow
def test_memory_fault_of_one_run_is_not_reproduced(tmp_path: Path, report: Report) -> None:
    good = train(tmp_path, "good", *FLIPPING)
    (tmp_path / "flip").touch()
    bad = train(tmp_path, "bad", *FLIPPING, options=("--processes", 2))
    (tmp_path / "flip").unlink()
    assert weights(good) != weights(bad)
    code, data = report(tmp_path, good, bad, "--trust")
    assert (code, data["first_different"], data["recipe"]) == (3, 7, [])
    assert [replay_of(data, number) for number in (0, 1)] == [(0, 1, 7, None), (0, 2, 7, 7)]


@pytest.mark.slow
def test_difference_of_the_code_is_found_in_the_replays(tmp_path: Path, report: Report) -> None:
    """With checksums after every fifth step, the first differing one is that of step 10."""
    train(tmp_path, "probe", every=0)
    (file,) = tmp_path.glob("seen-0-*")
    _, batches = read_calls(file)
    loss = ("loss.name=helpers.flipping:uneven", f"loss.options={{sample: {batches[6][0]}}}")
    one = train(tmp_path, "one", *loss, every=5)
    two = train(tmp_path, "two", *loss, options=("--processes", 2), every=5)
    code, data = report(tmp_path, one, two, "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 5, 10)
    finding = data["finding"]
    assert (finding["step"], finding["text"]) == (10, f"step 10, state after the step: {finding['tensor']}")
    assert [replayed["first_different"] for replayed in data["replays"]] == [None, None]
    assert report(tmp_path, one, two, "--no-replay")[1]["note"]


@pytest.mark.long
def test_replay_of_an_extended_run_starts_from_a_checkpoint(tmp_path: Path, report: Report) -> None:
    run = train(tmp_path, "a", "schedule.name=cosine", options=("--checkpoint-every", 5, "--keep", 9))
    assert here("resume", run, "--checksum-every", 1, "--keep", 9, "epochs=2", cwd=tmp_path) == 0
    for step, first in ((12, 10), (20, 13), (13, 10), (14, 13)):
        code, data = report(tmp_path, run, "--step", step, "--trust", "--processes", 2)
        assert (code, *replay_of(data)) == (0, first, 2, step - first, None)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "compared"), [(8, 1), (10, 2), (13, 2)])
def test_replay_computes_a_step_with_a_checksum(runs: Path, report: Report, step: int, compared: int) -> None:
    """The run has checksums of the steps 5 and 10, and checkpoints of the steps 10 and 13."""
    code, data = report(runs, "runs/coarse", "--step", step)
    assert (code, *replay_of(data)) == (0, 0, 1, compared, None)
    assert here("diff", "runs/coarse", "--step", 14, cwd=runs) == EXIT_INPUT  # after the end


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("runs/missing", "--step", 1), "E_NOT_A_RUN"),
        (("runs/a", "--step", 0), "E_VALUE"),
        (("runs/a",), "E_OPTION_CONFLICT"),
        (("runs/a", "--step", 2), "E_UNTRUSTED"),
        (("runs/script", "--step", 2), "E_NO_CHECKSUM"),
        (("runs/a", "--step", 2, "--trust", "--processes", 99), "E_TOO_MANY_RANKS"),
        (("runs/a", "runs/missing"), "E_NOT_A_RUN"),
        (("runs/a", "runs/silent"), "E_NO_CHECKSUM"),
        (("runs/coarse", "--step", 4), "E_NO_CHECKSUM"),
    ],
)
def test_invalid_input(runs: Path, refused: Callable[..., str], arguments: tuple[object, ...], code: str) -> None:
    assert f"[{code}]" in refused("diff", *arguments, "--json")


@pytest.fixture
def runs(tmp_path: Path, runs_of_module: Path) -> Path:
    (tmp_path / "runs").symlink_to(runs_of_module)
    return tmp_path


@pytest.fixture(scope="module")
def runs_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "a")
    (folder / "runs" / "a" / "signature").unlink()
    train(folder, "silent", every=0)
    train(folder, "coarse", options=("--checkpoint-every", 5), every=5)
    (folder / "runs" / "script").mkdir()
    (folder / "runs" / "script" / "run.json").write_text("{}", encoding="utf-8")
    return folder / "runs"
