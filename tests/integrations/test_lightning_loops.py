"""Resumption, data loaders and signals of Lightning's trainer with Samestep's strategy."""

from pathlib import Path
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.lightning_loops"
STEPS, STOPPED_AT, EPOCH = 32, 20, 16
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
    return {"folder": Path(folder), **dict(zip(jobs, run_jobs(MODULE, *jobs.values()), strict=True))}


def test_hooks_that_read_the_number_of_steps_change_no_bits(results: dict[str, Any]) -> None:
    estimated = results["estimated"]
    weights = estimated[""][1]
    assert estimated == {
        "": [0, weights, weights],
        "configure_optimizers": [STEPS, weights, weights],
        "setup": [STEPS, weights, weights],
    }


def test_zero_grad_in_place_keeps_the_gradients(results: dict[str, Any]) -> None:
    plain, in_place, counting = results["batches"]["weights"]
    assert plain == in_place == counting


def test_values_of_hooks_are_weighted_by_the_samples_of_global_batches(results: dict[str, Any]) -> None:
    number, val_number = results["batches"]["values"]
    assert number == pytest.approx((64 * sum(range(15)) + 43 * 15) / 1003, rel=1e-6)
    assert val_number == pytest.approx((40 * sum(range(5)) + 3 * 5) / 203, rel=1e-6)


def test_a_combined_loader_can_be_used_again(results: dict[str, Any]) -> None:
    again = results["loaders"]
    assert again["steps"] == 4
    assert again["values"] == again["expected"]
    assert len(again["predicted"][0]) == 41
    assert again["predicted"][0] == again["predicted"][1]


def test_a_stop_request_ends_all_ranks_after_the_step(results: dict[str, Any]) -> None:
    # The validation after the last step of an epoch is complete.
    assert results["stopped"] == [[STOPPED_AT, 203, "SIGTERMException"], [EPOCH, 203, "SIGTERMException"]]


@pytest.mark.parametrize(("name", "steps"), [("within", STOPPED_AT), ("after", EPOCH), ("requeue", STOPPED_AT + 1)])
def test_a_stopped_training_resumes_to_the_same_bits(name: str, steps: int, results: dict[str, Any]) -> None:
    number, weights = results["whole"]
    assert number == STEPS
    assert results[name] == [STEPS - steps, weights]


def test_requeue_signal_of_slurm_saves_between_two_steps(results: dict[str, Any]) -> None:
    assert results["requeued"] == [STEPS, results["whole"][1], ["after.ckpt", "hpc_ckpt_1.ckpt", "within.ckpt"]]
