"""`samestep diff` and `samestep replay` on runs of recipes and scripts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded import read_calls
from helpers.system import events, here, tree, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
FLIPPING = ("optimizer.name=helpers.flipping:FlippingAdamW", "optimizer.options={lr: 0.01}")


def train(folder: Path, name: str, *overrides: str, options: tuple[object, ...] = (), every: int = 1) -> Path:
    arguments = ("--name", name, "--checksum-every", every, *options, "--set", "epochs=1", *overrides)
    assert here("train", RECIPE, *arguments, cwd=folder) == 0
    return folder / "runs" / name


@pytest.fixture
def report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs a command with `--json`, and returns code and data; no run may change."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        before = tree(tmp_path / "runs")
        capfd.readouterr()
        code = here(*arguments, "--json", cwd=tmp_path)
        assert tree(tmp_path / "runs") == before
        output = capfd.readouterr()
        assert output.out, output.err
        return code, json.loads(output.out)

    return run


Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.mark.slow
def test_equal_runs_and_a_run_with_another_seed(tmp_path: Path, report: Report) -> None:
    one = train(tmp_path, "one")
    other = train(tmp_path, "other", options=("--processes", 2, "--strategy", "fsdp"))
    code, data = report("diff", one, other, "--trust")
    assert (code, data["equal"], data["first_different"], data["compared"]) == (0, True, None, 13)
    assert data["recipe"] == []
    assert "processes: 1 -> 2" in data["environment"]
    seeded = train(tmp_path, "seeded", "step.seed=1")
    code, data = report("diff", one, seeded)
    assert (code, data["equal"], data["first_different"]) == (3, False, 1)
    assert data["recipe"] == ["step.seed: 0 -> 1"]
    assert data["finding"] is None
    code, data = report("replay", other, "--step", 9, "--trust", "--processes", 3, "--strategy", "ddp")
    assert (code, data["equal"], data["compared"], data["processes"]) == (0, True, 9, 3)
    assert data["checksum"] == data["logged"] == events(one, "checksum")[8]["checksum"]


@pytest.mark.slow
def test_flipped_bit_of_one_run_is_located(tmp_path: Path, report: Report) -> None:
    """A memory fault: no replay has it, so it is located from the two checksums alone."""
    good = train(tmp_path, "good", *FLIPPING, options=("--checkpoint-every", 4))
    (tmp_path / "flip").touch()
    bad = train(tmp_path, "bad", *FLIPPING, options=("--processes", 2))
    (tmp_path / "flip").unlink()
    assert weights(good) != weights(bad)
    code, data = report("diff", good, bad, "--trust")
    assert (code, data["first_different"], data["recipe"]) == (3, 7, [])
    finding = data["finding"]
    assert (finding["step"], finding["tensor"], finding["stage"]) == (7, "5.weight", None)
    assert "bit 12 of element [1, 3] of value of 5.weight" in finding["text"]
    assert [line.partition(",")[0] for line in finding["replays"]] == [str(good), str(good), str(bad)]
    assert "has the logged checksums" in finding["replays"][1]
    assert finding["replays"][2].endswith("differs from the log from step 7 on")
    assert report("replay", good, "--step", 13, "--trust")[1]["compared"] == 2  # from step 12
    code, data = report("replay", bad, "--step", 13, "--trust", "--from-start")
    assert (code, data["equal"], data["first_different"]) == (3, False, 7)


@pytest.mark.slow
def test_difference_of_the_code_is_found_in_causal_order(tmp_path: Path, report: Report) -> None:
    """With checksums after every fifth step, the first differing one is that of step 10."""
    train(tmp_path, "probe", every=0)
    (file,) = tmp_path.glob("seen-0-*")
    _, microbatches = read_calls(file)
    loss = ("loss.name=helpers.flipping:uneven", f"loss.options={{sample: {microbatches[4 * 6 + 3][0]}}}")
    one = train(tmp_path, "one", *loss, every=5)
    two = train(tmp_path, "two", *loss, options=("--processes", 2), every=5)
    code, data = report("diff", one, two, "--trust")
    assert (code, data["last_equal"], data["first_different"]) == (3, 5, 10)
    finding = data["finding"]
    assert (finding["step"], finding["stage"]) == (7, "loss")
    assert "microbatch 3" in finding["text"]
    assert all("has the logged checksums" in line for line in finding["replays"])
    assert report("diff", one, two, "--no-replay")[1]["note"]


@pytest.mark.long
def test_replay_of_an_extended_run_starts_from_a_checkpoint(tmp_path: Path, report: Report) -> None:
    run = train(tmp_path, "a", "schedule.name=cosine", options=("--checkpoint-every", 5, "--keep", 9))
    assert here("resume", run, "--checksum-every", 1, "--keep", 9, "--set", "epochs=2", cwd=tmp_path) == 0
    code, data = report("replay", run, "--step", 12, "--trust", "--out", tmp_path / "state")
    assert (code, data["from_step"], data["compared"]) == (0, 10, 3)
    assert (tmp_path / "state" / "step-000000012" / "manifest.json").exists()
    code, data = report("replay", run, "--step", 20, "--trust", "--processes", 2)
    assert (code, data["from_step"], data["compared"]) == (0, 13, 8)
    code, data = report("replay", run, "--step", 13, "--trust")
    assert (code, data["from_step"], data["compared"]) == (0, 10, 4)
    code, data = report("replay", run, "--step", 14, "--trust")
    assert (code, data["from_step"], data["compared"]) == (0, 13, 2)


@pytest.mark.parametrize(("step", "compared"), [(8, 1), (10, 2), (13, 2)])
def test_replay_computes_a_step_with_a_checksum(
    runs: Path, capfd: pytest.CaptureFixture[str], step: int, compared: int
) -> None:
    """The run has checksums of the steps 5 and 10, and checkpoints of the steps 10 and 13."""
    capfd.readouterr()
    assert here("replay", "runs/coarse", "--step", step, "--json", cwd=runs) == 0
    data = json.loads(capfd.readouterr().out)
    assert (data["from_step"], data["step"], data["compared"], data["equal"]) == (0, step, compared, True)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("replay", "runs/missing", "--step", 1), "E_NOT_A_RUN"),
        (("replay", "runs/a", "--step", 0), "E_VALUE"),
        (("replay", "runs/a", "--step", 2), "E_UNTRUSTED"),
        (("replay", "runs/script", "--step", 2), "E_SCRIPT"),
        (("replay", "runs/a", "--step", 2, "--trust", "--processes", 99), "E_TOO_MANY_RANKS"),
        (("replay", "runs/a", "--step", 2, "--trust", "--out", "runs"), "E_OUTPUT"),
        (("diff", "runs/a", "runs/missing"), "E_NOT_A_RUN"),
        (("diff", "runs/a", "runs/silent"), "E_NO_CHECKSUM"),
        (("replay", "runs/silent", "--step", 5, "--trust"), "E_NO_CHECKSUM"),
        (("replay", "runs/coarse", "--step", 4), "E_NO_CHECKSUM"),
        (("replay", "runs/coarse", "--step", 14, "--from-start"), "E_VALUE"),
    ],
)
def test_invalid_input(runs: Path, refused: Callable[..., str], arguments: tuple[object, ...], code: str) -> None:
    assert f"[{code}]" in refused(*arguments)


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
