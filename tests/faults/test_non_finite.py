"""A loss that is not finite ends a run the same way on any number of processes, or costs one step."""

from pathlib import Path

import pytest

from system import events, here, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
FAULT = ("loss.name=recorded:not_finite_for", "loss.options={sample: 17}", "epochs=1")


@pytest.mark.parametrize("processes", [1, 3])
def test_stop_names_step_shard_and_samples_once_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: int
) -> None:
    assert here("train", RECIPE, "--name", "a", "--processes", processes, "--set", *FAULT, cwd=tmp_path) == 1
    said = capsys.readouterr()
    assert said.out == ""
    first = said.err.splitlines()[0]
    assert first.startswith("error: step ")
    assert "shard" in first
    assert " 17" in first
    assert said.err.count("error: ") == said.err.count("  rule: ") == said.err.count("  do:   ") == 1
    assert "Traceback" not in said.err
    steps = [event["step"] for event in events(tmp_path / "runs" / "a", "step")]
    assert f"error: step {len(steps) + 1}:" in first


def test_skip_leaves_one_step_out_with_the_same_bits_on_any_number_of_processes(tmp_path: Path) -> None:
    for processes in (1, 3):
        arguments = ("--name", processes, "--processes", processes, "--set", *FAULT, "step.non_finite=skip")
        assert here("train", RECIPE, *arguments, cwd=tmp_path) == 0
    one, three = (tmp_path / "runs" / str(processes) for processes in (1, 3))
    assert weights(one) == weights(three)
    for run in (one, three):
        skipped = [event for event in events(run, "step") if event["skipped"]]
        assert len(skipped) == 1
        assert skipped[0]["loss"] == "inf"
        assert events(run, "evaluation")[0]["train_loss"] < 10
