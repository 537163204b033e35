"""`samestep diff` on runs of recipes and scripts, whose directories are only read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import read_calls
from helpers.system import TESTS, events, here, tree, weights
from samestep.errors import EXIT_DIFFERS, EXIT_INPUT

RECIPE = TESTS / "helpers" / "recorded.yaml"
FLIPPING = ("optimizer.name=helpers.flipping:FlippingAdamW", "optimizer.options={lr: 0.01}")
LAST = 12  # step of the scripts

Report = Callable[..., tuple[int, dict[str, Any]]]


def train(folder: Path, name: str, *overrides: str, options: tuple[object, ...] = (), every: int = 1) -> Path:
    arguments = ("--name", name, "--checksum-every", every, *options, "--set", "epochs=1", *overrides)
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
    other = train(tmp_path, "other", options=("--processes", 2, "--strategy", "fsdp"))
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
    assert (code, data["finding"]["step"], data["finding"]["stage"]) == (3, 2, "before")


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
def test_difference_of_the_code_is_found_in_causal_order(tmp_path: Path, report: Report) -> None:
    """With checksums after every fifth step, the first differing one is that of step 10."""
    train(tmp_path, "probe", every=0)
    (file,) = tmp_path.glob("seen-0-*")
    _, microbatches = read_calls(file)
    loss = ("loss.name=helpers.flipping:uneven", f"loss.options={{sample: {microbatches[4 * 6 + 3][0]}}}")
    one = train(tmp_path, "one", *loss, every=5)
    two = train(tmp_path, "two", *loss, options=("--processes", 2), every=5)
    code, data = report(tmp_path, one, two, "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 5, 10)
    finding = data["finding"]
    assert (finding["step"], finding["stage"]) == (7, "loss")
    assert "microbatch 3" in finding["text"]
    assert [replayed["first_different"] for replayed in data["replays"]] == [None, None]
    assert report(tmp_path, one, two, "--no-replay")[1]["note"]


@pytest.mark.long
def test_replay_of_an_extended_run_starts_from_a_checkpoint(tmp_path: Path, report: Report) -> None:
    run = train(tmp_path, "a", "schedule.name=cosine", options=("--checkpoint-every", 5, "--keep", 9))
    assert here("resume", run, "--checksum-every", 1, "--keep", 9, "--set", "epochs=2", cwd=tmp_path) == 0
    for step, first in ((12, 10), (20, 13), (13, 10), (14, 13)):
        code, data = report(tmp_path, run, "--step", step, "--trust", "--processes", 2)
        assert (code, *replay_of(data)) == (0, first, 2, step - first, None)


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


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one script with the script: with checkpoints, without, with other arguments, and with a fault."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copy(TESTS / "helpers" / "replayed_loop.py", folder / "train.py")
    assert here("run", "--processes", 2, "train.py", "saved", True, cwd=folder) == 0
    assert here("run", "--processes", 1, "train.py", "other", False, cwd=folder) == 0
    assert here("run", "--processes", 1, "train.py", "coarse", True, 5, cwd=folder) == 0
    (folder / "fault").touch()
    assert here("run", "--processes", 1, "train.py", "faulty", False, cwd=folder) == 0
    (folder / "fault").unlink()
    return folder


@pytest.mark.slow
def test_steps_of_a_script_are_replayed_from_its_checkpoint(scripts: Path, report: Report) -> None:
    code, data = report(scripts, "runs/saved", "--step", 11, "--trust")
    assert (code, data["equal"], *replay_of(data)) == (0, True, 8, 2, 3, None)
    assert "value of 0.weight" in data["replays"][0]["by_name"]
    # A checkpoint of the step itself leaves nothing to compute, and the last step ends the script.
    code, data = report(scripts, "runs/saved", "--step", LAST, "--trust", "--processes", 1)
    assert (code, *replay_of(data)) == (0, 8, 1, 4, None)
    code, data = report(scripts, "runs/saved", "--step", 2, "--trust", "--processes", 1)
    assert (code, *replay_of(data)) == (0, 0, 1, 2, None)
    # Checksums of steps 5 and 10 are logged: the replay of step 9 begins at the checkpoint of step 4, not of 8.
    for step, first in ((11, 8), (9, 4)):
        code, data = report(scripts, "runs/coarse", "--step", step, "--trust")
        assert (code, *replay_of(data)) == (0, first, 1, 1, None)


@pytest.mark.slow
def test_diff_finds_the_first_different_step_of_scripts(scripts: Path, report: Report) -> None:
    code, data = report(scripts, "runs/saved", "runs/faulty", "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 6, 7)
    assert [replay_of(data, number) for number in (0, 1)] == [(4, 2, 3, None), (0, 1, 7, 7)]
    code, data = report(scripts, "runs/faulty", "--step", 8, "--trust")
    assert (code, data["equal"], *replay_of(data)) == (3, False, 0, 1, 8, 7)


@pytest.mark.slow
def test_first_different_tensor_of_scripts_is_located(scripts: Path, report: Report) -> None:
    code, data = report(scripts, "runs/saved", "runs/other", "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 6, 7)
    assert (data["finding"]["step"], data["finding"]["tensor"]) == (7, "2.bias")
    assert [replayed["first_different"] for replayed in data["replays"]] == [None, None]


@pytest.mark.slow
def test_changed_script_is_named(scripts: Path, refused: Callable[..., str]) -> None:
    script = scripts / "train.py"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("lr=0.01", "lr=0.02"), encoding="utf-8")
    try:
        message = refused("diff", scripts / "runs" / "saved", "--step", 3, "--trust", "--json")
        assert "[E_CODE_CHANGED]" in message
        assert "train.py" in message
        accepted = ("diff", "runs/saved", "--step", 3, "--trust", "--accept-changes")
        assert here(*accepted, cwd=scripts) == EXIT_DIFFERS
    finally:
        script.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_refusals_of_scripts(scripts: Path, refused: Callable[..., str]) -> None:
    run, step = scripts / "runs" / "saved", ("--step", 3)
    assert "[E_NO_CHECKSUM]" in refused("diff", scripts / "runs" / "coarse", *step, "--trust")
    assert f"--step {LAST} or less" in refused("diff", run, "--step", 600, "--trust", "--json")
    assert "[E_UNTRUSTED]" in refused("diff", run, *step)
    moved = scripts / "moved"
    shutil.copytree(run, moved)
    starts = json.loads((moved / "environment.json").read_text(encoding="utf-8"))
    for changes in ({"started_as": "function"}, {"script": "missing.py"}, {"arguments": None}):
        (moved / "environment.json").write_text(json.dumps([{**starts[-1], **changes}]), encoding="utf-8")
        assert "[E_SCRIPT]" in refused("diff", moved, *step, "--trust")
