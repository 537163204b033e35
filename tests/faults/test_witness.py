"""Runs with `--witness-every`: wrong gradients of one rank end the run with one report that names the rank."""

from pathlib import Path

import pytest

from helpers.system import Running, events, here, steps_saved, until, weights

# Rank 2 of 3 computes three microbatches in each step, and one more in step 4: call 20 is the first one of step 7.
MODEL = "model.name=helpers.drifting:Corrupting"
TRAIN = ("train", "digits", "--name", "a", "--set", "epochs=1", MODEL)


@pytest.mark.slow
def test_wrong_gradients_end_the_run_and_a_checkpoint_of_a_witnessed_step_is_resumed(tmp_path: Path) -> None:
    options = ("model.options={rank: 2, call: 20}", "--witness-every", 4, "--checkpoint-every", 3, "--max-restarts", 2)
    with Running(*TRAIN, *options, "--processes", 3, cwd=tmp_path) as running:
        done = running.wait(60)
        assert done.code == 1
        report = done.err[done.err.index("error: ") :].splitlines()
        assert done.err.count("error: ") == 1
        assert "restart" not in done.err
        assert report[0] == (
            "error: step 8: rank 2 computed wrong values; last witnessed without a difference in step 4 [E_WITNESS]"
        )
        assert "    rank 2: host " in report[1]
        assert "a checkpoint of step 4 or before" in done.err
        until(lambda: not running.processes(), "no process", 30)
    run = tmp_path / "runs" / "a"
    assert steps_saved(run) == [3, 6]
    assert events(run, "step")[-1]["step"] == 7
    # Without the third process.
    assert here("resume", run, "--checkpoint", 3, "--processes", 2, "--witness-every", 2, cwd=tmp_path) == 0
    reference = tmp_path / "reference"
    reference.mkdir()
    assert here(*TRAIN, "model.options={rank: 9, call: 0}", cwd=reference) == 0
    assert weights(run) == weights(reference / "runs" / "a")
