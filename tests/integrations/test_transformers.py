"""Trainer of Transformers with Samestep's steps and evaluations: the same bits on any number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.transformers_training"
SAVED_AT = 10  # step in the second epoch, which has 7


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of trainings in one process that imports Transformers once."""
    folder = tmp_path_factory.mktemp("trainings")
    saved = {"folder": str(folder / "saved")}
    jobs = {
        "one": Job("train", 1, {"folder": str(folder / "one")}),
        "saved": Job("train", 2, {**saved, "save_at": SAVED_AT}),
        "changed": Job("other_batches", 1, saved),
        "resumed": Job("train", 3, {**saved, "resume": True}),
        "stock": Job("stock", 1, {"folder": str(folder / "stock")}),
        "missing names": Job("missing_names", 1, {"folder": str(folder / "names")}),
        "stopped": Job("stop", 2, {"folder": str(folder / "stopped")}),
        "restored": Job("restore", 1, {"folder": str(folder / "restored")}),
        "automatic": Job("auto_microbatches", 1, {"folder": str(folder / "automatic")}),
        "options of a step": Job("options_of_step", 1, {"folder": str(folder / "step")}),
        "tagged on 1": Job("tag", 1, {"folder": str(folder / "tagged-1"), "size": 8}),
        "tagged on 3": Job("tag", 3, {"folder": str(folder / "tagged-3"), "size": 2}),
    }
    results = dict(zip(jobs, run_jobs(MODULE, *jobs.values()), strict=True))
    return {"run": folder / "saved" / "run", **results}


@pytest.mark.slow
def test_checkpoint_of_the_trainer_resumes_in_the_epoch_on_other_processes(results: dict[str, Any]) -> None:
    one, saved, resumed = results["one"], results["saved"], results["resumed"]
    assert len(one["history"]) == 14
    assert saved["history"] == one["history"][:SAVED_AT]
    assert resumed["history"] == one["history"]  # with the steps of the checkpoint
    assert resumed["weights"] == one["weights"]


@pytest.mark.slow
def test_both_parts_of_the_training_are_in_one_run_directory(results: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in (results["run"] / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "resume"] == [SAVED_AT]
    # Without the steps after the last logged one: the processes of this test end without the end of the run.
    assert max(line["step"] for line in lines if line["event"] == "step") > SAVED_AT


@pytest.mark.slow
def test_evaluation_counts_each_token_once(results: dict[str, Any]) -> None:
    one, resumed = results["one"]["evaluated"], results["resumed"]["evaluated"]
    assert one == resumed
    assert one["eval_tokens"] == results["one"]["tokens"]
    assert 0 < one["eval_loss"] < 5


@pytest.mark.slow
def test_step_is_that_of_the_trainer_on_one_process(results: dict[str, Any]) -> None:
    stock = results["stock"]
    assert stock["samestep"] == pytest.approx(stock["stock"], rel=1e-6)
    # Precision and context of the trainer.
    step = results["options of a step"]
    assert step["tf32"]
    assert step["entries"] == 2
    assert step["operations"] == step["sum"] > 0


@pytest.mark.slow
def test_stop_request_of_one_rank_ends_the_training_with_a_checkpoint(results: dict[str, Any]) -> None:
    assert results["stopped"] == [3, ["checkpoint-3"]]


@pytest.mark.slow
def test_settings_of_data_are_saved_after_a_resumption(results: dict[str, Any]) -> None:
    first, *others = results["restored"]["settings"]
    assert first["batch_size"] == 32
    # With the states of callbacks, and from a checkpoint of the trainer of Transformers.
    assert others == [first, first]
    assert results["restored"]["changed"] == results["changed"] == "E_RESUME_CHANGED"
    assert results["missing names"] == []


@pytest.mark.slow
def test_automatic_microbatches_do_not_depend_on_the_mode_of_the_model(results: dict[str, Any]) -> None:
    in_training, in_evaluation, without_batch_norm = results["automatic"]
    assert in_training == in_evaluation != without_batch_norm


@pytest.mark.slow
def test_microbatches_without_labels_and_groups_of_lengths_have_the_same_bits(results: dict[str, Any]) -> None:
    one, three = results["tagged on 1"], results["tagged on 3"]
    assert one["unlabelled"]
    # Also with another per_device_train_batch_size, which is not used.
    assert one["weights"] == three["weights"]
    # Several predictions are padded separately.
    assert one["shapes"] == three["shapes"] == [[57, 29, 40], [57, 40]]
    assert one["sums"] == three["sums"]


@pytest.mark.long
def test_training_has_the_same_bits_on_any_processes(tmp_path: Path) -> None:
    jobs = [
        Job(function, size, {"folder": str(tmp_path / f"{function}-{size}")})
        for function in ("train", "generate", "frozen")
        for size in (1, 2, 3, 4)
    ]
    results = run_jobs(MODULE, *jobs)
    for start in range(0, len(jobs), 4):
        assert all(result == results[start] for result in results[start : start + 4]), jobs[start].function


# --- predictions, losses and comparisons of ranks in evaluations ---


EVALUATED, SIZE = 57, 5  # of evaluations: samples of the dataset, and of a microbatch


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    folder = tmp_path_factory.mktemp("evaluations")
    calls = [("predict", 1), ("predict", 3), ("counted_labels", 1), ("counted_labels", 3)]
    calls += [("outputs_without_rows", 1), ("outputs_without_rows", 2), ("other_weights", 2)]
    jobs = [Job(function, size, {"folder": str(Path(folder, f"{function}-{size}"))}) for function, size in calls]
    return dict(zip(calls, run_jobs("workers.transformers_evaluation", *jobs), strict=True))


@pytest.mark.slow
def test_predictions_have_the_same_bits_on_any_processes(evaluations: dict[tuple[str, int], Any]) -> None:
    one, three = evaluations["predict", 1], evaluations["predict", 3]
    assert one == three
    assert one["loss"][0] == one["loss"][1]
    assert evaluations["counted_labels", 1] == evaluations["counted_labels", 3]
    tokens, second, labels, reduced, second_of_reduced = one["shapes"]
    microbatches = 16  # a global batch of 8 of 5 samples, and one of 8 of the remaining 17
    assert second == second_of_reduced == [microbatches]  # an output without dimensions
    assert len(set(one["seconds"])) == microbatches
    assert tokens[:2] == reduced[:2] == labels == [EVALUATED, 29]
    assert (one["largest"], reduced[-1]) == (SIZE, 3)  # preprocessed for each microbatch


@pytest.mark.slow
def test_evaluations_that_differ_between_ranks_are_refused(evaluations: dict[tuple[str, int], Any]) -> None:
    for size in (1, 2):
        result = evaluations["outputs_without_rows", size]
        assert "E_INTEGRATION" in result["text"]
        assert "predictions[2] of the shape (40, 4)" in result["text"]
        assert "ignore_keys" in result["text"]
        assert result["ignored"] == "none"
    assert evaluations["other_weights", 2] == ["none", "E_RANK_MISMATCH", "E_RANK_MISMATCH"]
