"""Lightning's trainer with Samestep's strategy: the same bits on any number of processes."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.lightning_training"
SAVED_AT = 21  # step in the second epoch, which has 16


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of trainings in one process that imports Lightning once."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    jobs = {
        "own": Job("own_loop", 1, {}),
        "one": Job("train", 1, {}),
        "saved": Job("train", 2, {"folder": folder, "save_at": SAVED_AT}),
        "resumed": Job("train", 3, {"folder": folder, "resume": True}),
        "changed": Job("other_batches", 1, {"folder": folder}),
        "evaluated on 1": Job("evaluate", 1, {}),
        "evaluated on 3": Job("evaluate", 3, {}),
        "missing names": Job("missing_names", 1, {}),
        "refusals": Job("refusals", 1, {}),
        "collectives": Job("collectives", 1, {}),
        "written on 1": Job("written", 1, {}),
        "written on 3": Job("written", 3, {}),
    }
    return {"run": Path(folder) / "run", **dict(zip(jobs, run_jobs(MODULE, *jobs.values()), strict=True))}


@pytest.mark.slow
def test_training_has_the_bits_of_the_own_loop(results: dict[str, Any]) -> None:
    own, one = results["own"], results["one"]
    assert one["weights"] == own["weights"]
    assert [step[0] for step in one["steps"]] == [float(numpy.float32(loss)) for loss in own["losses"]]


@pytest.mark.slow
def test_checkpoint_of_lightning_resumes_in_the_epoch_on_other_processes(results: dict[str, Any]) -> None:
    one, saved, resumed = results["one"], results["saved"], results["resumed"]
    assert saved["steps"] == one["steps"][:SAVED_AT]
    assert resumed["steps"] == one["steps"][SAVED_AT:]
    assert resumed["weights"] == one["weights"]
    assert saved["epochs"][0] == one["epochs"][0]
    # Lightning does not save the sums of an epoch; values of validation are those of the weights.
    assert resumed["epochs"][-1][2:] == one["epochs"][-1][2:]


@pytest.mark.slow
def test_both_parts_of_the_training_are_in_one_run_directory(results: dict[str, Any]) -> None:
    run = results["run"]
    assert [event["processes"] for event in json.loads((run / "environment.json").read_text())] == [2, 3]
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "resume"] == [SAVED_AT]
    assert max(line["step"] for line in lines if line["event"] == "step") == len(results["one"]["steps"])
    assert {path.name for path in (run / "ranks").iterdir()} == {f"rank-{rank}.jsonl" for rank in range(3)}


@pytest.mark.slow
def test_logged_values_are_those_of_the_global_batch(results: dict[str, Any]) -> None:
    steps = results["saved"]["steps"]
    assert [samples for _, samples, _ in steps[:16]] == [64.0] * 15 + [1003.0 % 64]
    assert all(logged == loss for logged, _, loss in steps)
    weighted = sum(loss * samples for loss, samples, _ in steps[:16]) / 1003
    assert results["saved"]["epochs"][0][0] == pytest.approx(weighted, rel=1e-6)


@pytest.mark.slow
def test_evaluation_counts_each_sample_once_on_any_processes(results: dict[str, Any]) -> None:
    one, three = results["evaluated on 1"], results["evaluated on 3"]
    assert one == three
    assert one["validate"] == one["test"]
    assert one["validate"]["val_samples"] == 203
    assert len(one["predict"]) == 203


@pytest.mark.slow
def test_features_that_do_not_fit_are_refused(results: dict[str, Any]) -> None:
    assert results["changed"] == "E_RESUME_CHANGED"
    assert results["missing names"] == []
    codes = results["refusals"] | results["collectives"]
    assert codes.pop("none") == codes.pop("registered") == codes.pop(" all_gather") == "none"
    assert codes.pop("stream") == codes.pop("distributed") == "E_LOADER"
    assert set(codes.values()) == {"E_INTEGRATION"}, codes


@pytest.mark.slow
def test_writers_of_predictions_receive_the_indices_of_the_whole_batch(results: dict[str, Any]) -> None:
    batches = [list(range(start, min(start + 20, 50))) for start in (0, 20, 40)]
    assert results["written on 1"] == results["written on 3"] == [*batches, [batches]] * 2


@pytest.mark.long
def test_training_has_the_same_bits_on_any_processes(tmp_path: Path) -> None:
    saved = Job("train", 2, {"folder": str(tmp_path), "save_at": SAVED_AT})
    resumed = Job("train", 1, {"folder": str(tmp_path), "resume": True})
    sizes = (1, 2, 3, 5)
    jobs = [Job("train", size, {}) for size in sizes] + [Job("mixed", size, {}) for size in sizes]
    *whole, _, last = run_jobs(MODULE, *jobs, saved, resumed)
    trained, mixed = whole[: len(sizes)], whole[len(sizes) :]
    assert all(result == trained[0] for result in trained)
    assert len(set(mixed)) == 1
    assert last["weights"] == trained[0]["weights"]


# --- resumption, data loaders and signals ---


STEPS, STOPPED_AT, EPOCH = 32, 20, 16


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs = {
        "estimated": Job("estimated", 2, {"folder": str(folder)}),
        "batches": Job("batches", 2, {}),
        "loaders": Job("loaders_again", 2, {}),
        "stopped": Job("stopped", 2, {"folder": str(folder)}),
        "requeued": Job("requeued", 2, {"folder": str(folder)}),
        "whole": Job("resumed", 1, {"path": ""}),
        "within": Job("resumed", 1, {"path": str(folder / "within.ckpt")}),
        "after": Job("resumed", 3, {"path": str(folder / "after.ckpt")}),
        "requeue": Job("resumed", 1, {"path": str(folder / "hpc_ckpt_1.ckpt")}),
    }
    return {"folder": Path(folder), **dict(zip(jobs, run_jobs("workers.lightning_loops", *jobs.values()), strict=True))}


@pytest.mark.slow
def test_hooks_that_read_the_number_of_steps_change_no_bits(loops: dict[str, Any]) -> None:
    estimated = loops["estimated"]
    weights = estimated[""][1]
    assert estimated == {
        "": [0, weights, weights],
        "configure_optimizers": [STEPS, weights, weights],
        "setup": [STEPS, weights, weights],
    }


@pytest.mark.slow
def test_hooks_of_batches(loops: dict[str, Any]) -> None:
    """Gradients are zeroed in place, and values weighted by the samples of global batches."""
    plain, in_place, counting = loops["batches"]["weights"]
    assert plain == in_place == counting
    number, val_number = loops["batches"]["values"]
    assert number == pytest.approx((64 * sum(range(15)) + 43 * 15) / 1003, rel=1e-6)
    assert val_number == pytest.approx((40 * sum(range(5)) + 3 * 5) / 203, rel=1e-6)


@pytest.mark.slow
def test_a_combined_loader_can_be_used_again(loops: dict[str, Any]) -> None:
    again = loops["loaders"]
    assert again["steps"] == 4
    assert again["values"] == again["expected"]
    assert len(again["predicted"][0]) == 41
    assert again["predicted"][0] == again["predicted"][1]


@pytest.mark.slow
def test_stop_requests_and_the_requeue_signal_of_slurm(loops: dict[str, Any]) -> None:
    # The validation after the last step of an epoch is complete.
    assert loops["stopped"] == [[STOPPED_AT, 203, "SIGTERMException"], [EPOCH, 203, "SIGTERMException"]]
    number, weights = loops["whole"]
    assert number == STEPS
    for name, steps in (("within", STOPPED_AT), ("after", EPOCH), ("requeue", STOPPED_AT + 1)):
        assert loops[name] == [STEPS - steps, weights], name
    assert loops["requeued"] == [STEPS, weights, ["after.ckpt", "hpc_ckpt_1.ckpt", "within.ckpt"]]
