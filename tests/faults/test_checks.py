"""Runs with `--check-every`: a rank with different weights ends the run with one report."""

from pathlib import Path

import pytest

from helpers.system import Running, events, here, steps_saved, until, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
# Four ranks compute one microbatch each, so the seventh training forward is that of step 7. An epoch has 13 steps.
DRIFT = ("--set", "model.name=helpers.drifting:Drifting", "model.options={rank: 2, call: 7}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "step", "saved"),
    [((), 10, []), (("--checkpoint-every", 4), 8, [4])],
    ids=["at a check", "before a checkpoint"],
)
def test_different_weights_end_the_run_with_one_report_and_no_process_left(
    tmp_path: Path, options: tuple[object, ...], step: int, saved: list[int]
) -> None:
    arguments = ("--name", "a", "--processes", 4, "--check-every", 5, *options, *DRIFT)
    with Running("train", RECIPE, *arguments, cwd=tmp_path) as running:
        done = running.wait(60)
        assert done.code == 1
        assert done.out == ""
        report = done.err[done.err.index("error: ") :].splitlines()
        assert report[0].startswith(f"error: after step {step}, rank 2 differs from ranks 0, 1 and 3; ")
        assert report[0].endswith("after step 5 [E_RANK_MISMATCH]")
        assert report[1:3] == ["  1 of 30 tensors differ:", "    parameter 5.weight"]
        assert [line.split()[0] for line in report[3:]] == ["expected:", "fix:", *["then:"] * len(saved)]
        assert "Traceback" not in done.err
        until(lambda: not running.processes(), "no process", 30)
    run = tmp_path / "runs" / "a"
    assert steps_saved(run) == saved if saved else not (run / "checkpoints").exists()
    assert events(run, "step")[-1]["step"] == (9 if step == 10 else 8)


def test_difference_is_reported_at_the_save_without_checks_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("train", RECIPE, "--name", "a", "--processes", 4, *DRIFT, "epochs=1", cwd=tmp_path) == 1
    errors = capsys.readouterr().err
    assert "error: after step 13, rank 2 differs from ranks 0, 1 and 3; last equal after step 0" in errors
    assert steps_saved(tmp_path / "runs" / "a") == []


@pytest.mark.slow
def test_correct_run_has_the_same_bits_with_checks_also_after_a_resume(tmp_path: Path) -> None:
    for name, options in {"plain": (), "checked": ("--check-every", 3)}.items():
        arguments = ("--name", name, "--processes", 3, *options, "--set", "epochs=2")
        assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    plain, checked = (tmp_path / "runs" / name for name in ("plain", "checked"))
    assert weights(plain) == weights(checked)
    command = ("resume", checked, "--processes", 2, "--check-every", 1, "--checkpoint", 13)
    assert here(*command, cwd=tmp_path) == 0
    assert weights(plain) == weights(checked)


def test_check_every_zero_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("train", RECIPE, "--name", "a", "--set", "epochs=1", cwd=tmp_path) == 0
    for command in (("train", RECIPE, "--name", "b"), ("resume", tmp_path / "runs" / "a")):
        capsys.readouterr()
        assert here(*command, "--check-every", 0, cwd=tmp_path) == 2
        title = capsys.readouterr().err.splitlines()[0]
        assert "--check-every: 0 is below 1 [E_VALUE]" in title
