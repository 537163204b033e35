"""Runs with `--witness-every`: wrong gradients of one rank end the run with one report that names the rank."""

from pathlib import Path

import pytest

from helpers.system import Running, events, here, steps_saved, until, weights

# Rank 2 of 3 computes three microbatches in each step, and one more in step 4: call 20 is the first one of step 7.
TRAIN = ("train", "digits", "--name", "a", "--set", "epochs=1", "model.name=helpers.drifting:Corrupting")
WRONG = ("model.options={rank: 2, call: 20}", "--witness-every", 4, "--checkpoint-every", 3, "--processes", 3)
REPORT = "error: step 8: rank 2 computed wrong values; last witnessed without a difference in step 4 [E_WITNESS]"


@pytest.mark.slow
def test_wrong_gradients_end_the_run_with_the_right_rank_and_no_process_left(tmp_path: Path) -> None:
    with Running(*TRAIN, *WRONG, "--max-restarts", 2, cwd=tmp_path) as running:
        done = running.wait(60)
        assert done.code == 1
        report = done.err[done.err.index("error: ") :].splitlines()
        assert (report[0], done.err.count("error: ")) == (REPORT, 1)
        assert report[1].startswith("    rank 2: host ")
        assert [line.split()[0] for line in report[1:]] == ["rank", "microbatch", "microbatch", "expected:", "fix:"]
        assert "restart" not in done.err
        until(lambda: not running.processes(), "no process", 30)
    run = tmp_path / "runs" / "a"
    assert steps_saved(run) == [3, 6]
    assert events(run, "step")[-1]["step"] == 7


@pytest.mark.long
def test_resume_from_a_witnessed_step_on_other_processes_has_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    reference, run = tmp_path / "reference", tmp_path / "runs" / "a"
    reference.mkdir()
    assert here(*TRAIN, "model.options={rank: 9, call: 0}", cwd=reference) == 0
    assert here(*TRAIN, *WRONG, cwd=tmp_path) == 1
    assert here("resume", run, "--checkpoint", 3, "--processes", 2, "--witness-every", 2, cwd=tmp_path) == 0
    assert weights(run) == weights(reference / "runs" / "a")
