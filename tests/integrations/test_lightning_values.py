"""Logged values of Lightning with Samestep's strategy: equal on any number of processes, or an error."""

from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.lightning_values"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    jobs = {
        "few on 1": Job("few", 1, {}),
        "few on 3": Job("few", 3, {}),
        "metrics on 1": Job("collectives_of_metrics", 1, {}),
        "metrics on 2": Job("collectives_of_metrics", 2, {}),
        "hooks": Job("hooks", 2, {}),
        "warned": Job("warned", 1, {}),
        "refused": Job("refused", 1, {}),
    }
    return dict(zip(jobs, run_jobs(MODULE, *jobs.values(), timeout=120), strict=True))


def test_metrics_are_complete_if_a_rank_has_no_samples(results: dict[str, Any]) -> None:
    assert results["few on 1"] == results["few on 3"]
    assert results["few on 1"]["values"]["val_samples"] == 42
    assert {"a", "f", "rare", "val_accuracy"} <= set(results["few on 1"]["values"])


def test_metrics_that_communicate_in_a_step_are_refused(results: dict[str, Any]) -> None:
    for processes in (1, 2):
        refused = dict(results[f"metrics on {processes}"])
        assert refused.pop("none") == ["none", ""]
        assert "dist_sync_on_step=True" in refused["dist_sync_on_step"][1]
        for name, (code, text) in refused.items():
            assert code == "E_INTEGRATION", name
            assert "MulticlassAccuracy" in text


def test_values_of_hooks_that_differ_between_ranks_are_refused(results: dict[str, Any]) -> None:
    refused = dict(results["hooks"])
    assert refused.pop("") == ["none", ""]
    test, _, validation, text = refused.pop("callback")
    assert test == "none"
    refused["callback"] = [validation, text]
    for name, (code, text) in refused.items():
        assert code == "E_INTEGRATION", name
        assert "a hook logged 'own'" in text


def test_metrics_whose_bits_depend_on_the_processes_are_reported(results: dict[str, Any]) -> None:
    (message,) = results["warned"]
    assert "error (MeanSquaredError)" in message
    assert "areas.listed (BinaryAUROC)" in message
    assert "exact" not in message


def test_options_without_a_meaning_for_global_batches_are_refused(results: dict[str, Any]) -> None:
    for name, (code, text) in results["refused"].items():
        assert code == "E_INTEGRATION", name
        is_mode = name in ("min_size", "max_size")
        assert ("with a batch of 2 DataLoaders at once" if is_mode else name) in text
