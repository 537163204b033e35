"""Evaluations of the trainer of Transformers: predictions, losses and comparisons of ranks."""

from pathlib import Path
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

EVALUATED, SIZE = 57, 5  # samples of the dataset, and of a microbatch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    folder = tmp_path_factory.mktemp("evaluations")
    calls = [("predict", 1), ("predict", 3), ("counted_labels", 1), ("counted_labels", 3)]
    calls += [("outputs_without_rows", 1), ("outputs_without_rows", 2), ("other_weights", 2)]
    jobs = [Job(function, size, {"folder": str(Path(folder, f"{function}-{size}"))}) for function, size in calls]
    return dict(zip(calls, run_jobs("workers.transformers_evaluation", *jobs), strict=True))


@pytest.mark.slow
def test_predictions_have_the_same_bits_on_any_processes(results: dict[tuple[str, int], Any]) -> None:
    one, three = results["predict", 1], results["predict", 3]
    assert one == three
    assert one["loss"][0] == one["loss"][1]
    assert results["counted_labels", 1] == results["counted_labels", 3]


@pytest.mark.slow
def test_output_without_dimensions_is_one_value_per_microbatch(results: dict[tuple[str, int], Any]) -> None:
    tokens, second, labels, reduced, second_of_reduced = results["predict", 1]["shapes"]
    microbatches = 16  # a global batch of 8 of 5 samples, and one of 8 of the remaining 17
    assert second == second_of_reduced == [microbatches]
    assert len(set(results["predict", 1]["seconds"])) == microbatches
    assert tokens[:2] == reduced[:2] == labels == [EVALUATED, 29]


@pytest.mark.slow
def test_predictions_are_preprocessed_for_each_microbatch(results: dict[tuple[str, int], Any]) -> None:
    assert results["predict", 1]["largest"] == SIZE
    assert results["predict", 1]["shapes"][3][-1] == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_output_without_rows_is_refused_with_the_option_that_leaves_it_out(
    results: dict[tuple[str, int], Any], size: int
) -> None:
    result = results["outputs_without_rows", size]
    assert "E_INTEGRATION" in result["text"]
    assert "predictions[2] of the shape (40, 4)" in result["text"]
    assert "ignore_keys" in result["text"]
    assert result["ignored"] == "none"


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused_in_an_evaluation_before_a_step(
    results: dict[tuple[str, int], Any],
) -> None:
    assert results["other_weights", 2] == ["none", "E_RANK_MISMATCH", "E_RANK_MISMATCH"]
