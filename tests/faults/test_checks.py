"""A run whose ranks drift apart ends with one report, and saves nothing of it as good."""

from pathlib import Path

import pytest

from system import Running, events, here, samestep, steps_saved, until, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
# Four ranks have a shard each, so the seventh training forward of a rank is that of step 7; an epoch has 13 steps.
DRIFT = ("--set", "model.name=drifting:Drifting", "model.options={rank: 2, call: 7}")


@pytest.mark.parametrize(
    ("options", "step", "saved"),
    [((), 10, []), (("--checkpoint-every", 4), 8, [4])],
    ids=["at a check", "before a checkpoint"],
)
def test_drift_ends_the_run_with_one_report_and_no_process_left(
    tmp_path: Path, options: tuple[object, ...], step: int, saved: list[int]
) -> None:
    arguments = ("--name", "a", "--processes", 4, "--check-every", 5, *options, *DRIFT)
    with Running("train", RECIPE, *arguments, cwd=tmp_path) as running:
        done = running.wait(60)
        assert done.code == 1
        assert done.out == ""
        report = done.err[done.err.index("error: ") :].splitlines()
        assert report[:3] == [
            f"error: after step {step}, rank 2 no longer holds what ranks 0, 1 and 3 hold; "
            "they agreed last after step 5",
            "  1 of 30 tensors differ:",
            "    parameter 5.weight",
        ]
        assert [line[:7] for line in report[3:]] == ["  rule:", "  do:  ", *["  then:"] * len(saved)]
        assert "Traceback" not in done.err
        until(lambda: not running.processes(), "no process", 30)
    run = tmp_path / "runs" / "a"
    assert steps_saved(run) == saved if saved else not (run / "checkpoints").exists()
    assert events(run, "step")[-1]["step"] == (9 if step == 10 else 8)


def test_without_checks_the_run_ends_as_if_well(tmp_path: Path) -> None:
    """Which is what they are for."""
    assert here("train", RECIPE, "--name", "a", "--processes", 4, *DRIFT, "epochs=1", cwd=tmp_path) == 0


def test_a_good_run_has_the_same_bits_with_checks_and_is_resumed_with_them(tmp_path: Path) -> None:
    for name, options in {"plain": (), "checked": ("--check-every", 3)}.items():
        one = ("--name", name, "--processes", 3, *options, "--set", "epochs=2")
        assert here("train", RECIPE, *one, cwd=tmp_path) == 0
    plain, checked = (tmp_path / "runs" / name for name in ("plain", "checked"))
    assert weights(plain) == weights(checked)
    again = ("resume", checked, "--processes", 2, "--check-every", 1, "--checkpoint", 13)
    assert here(*again, cwd=tmp_path) == 0
    assert weights(plain) == weights(checked)


@pytest.mark.parametrize("command", ["train", "resume"])
def test_fewer_than_one_step_is_refused(tmp_path: Path, command: str) -> None:
    assert here("train", RECIPE, "--name", "a", "--set", "epochs=1", cwd=tmp_path) == 0
    arguments = (RECIPE, "--name", "b") if command == "train" else (tmp_path / "runs" / "a",)
    done = samestep(command, *arguments, "--check-every", 0, cwd=tmp_path)
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: check_every is 0",
        "  rule: at least 1 step",
        "  do:   --check-every 100",
    ]
