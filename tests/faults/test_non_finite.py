"""Runs with a non-finite loss, with `non_finite: stop` and `skip`, on any number of processes."""

from pathlib import Path

import pytest

from helpers.system import events, here, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
FAULT = ("loss.name=helpers.recorded:infinite_for_sample", "loss.options={sample: 17}", "epochs=1")


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 3])
def test_stop_reports_step_and_samples_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: int) -> None:
    assert here("train", RECIPE, "--name", "a", "--processes", processes, *FAULT, cwd=tmp_path) == 1
    output = capsys.readouterr()
    assert output.out == ""
    title = output.err.splitlines()[0]
    assert title.startswith("error: step ")
    assert title.endswith("[E_NONFINITE]")
    assert " 17" in title
    assert output.err.count("error: ") == output.err.count("  expected: ") == output.err.count("  fix:      ") == 1
    assert "Traceback" not in output.err
    steps = [event["step"] for event in events(tmp_path / "runs" / "a", "step")]
    assert f"error: step {len(steps) + 1}:" in title


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("optimizer.options={lr: 0.01, fused: true}",), marks=pytest.mark.long)],
    ids=["plain", "fused"],
)
def test_skip_gives_the_same_bits_on_any_number_of_processes(tmp_path: Path, options: tuple[str, ...]) -> None:
    for processes in (1, 3):
        arguments = ("--name", processes, "--processes", processes, *FAULT, *options, "step.non_finite=skip")
        assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    one, three = (tmp_path / "runs" / str(processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    for run in (one, three):
        skipped = [event for event in events(run, "step") if event["skipped"]]
        assert len(skipped) == 1
        assert skipped[0]["loss"] == "inf"
        assert events(run, "evaluation")[0]["train_loss"] < 10
