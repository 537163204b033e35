"""Options and callbacks of Lightning's trainer: the same bits on any number of processes."""

from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.lightning_options"
JOBS = ("works", "tuned", "best")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    folder = tmp_path_factory.mktemp("options")
    jobs = {
        (name, ranks): Job(name, ranks, {"folder": str(folder / f"{name}-{ranks}")})
        for name in JOBS
        for ranks in (1, 3)
    }
    return dict(zip(jobs, run_jobs(MODULE, *jobs.values(), timeout=230), strict=True))


@pytest.mark.long
def test_options_have_the_same_bits_on_any_processes(results: dict[tuple[str, int], Any]) -> None:
    one, three = results["works", 1], results["works", 3]
    assert [name for name in one if one[name] != three[name]] == []
    steps = {name: row[1] for name, row in one.items()}
    assert steps["limit_train_batches"] == 3  # half of seven global batches
    assert steps["overfit_batches"] == 6
    assert steps["fast_dev_run"] == 2
    assert steps["on_train_batch_start"] == 6
    assert steps["EarlyStopping"] == 14  # two of four epochs
    counted = one["two validation loaders"][2]
    assert [counted[f"val_samples/dataloader_idx_{number}"] for number in (0, 1)] == [41, 23]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tuned", "best"])
def test_tuner_and_best_checkpoint_have_the_same_bits(name: str, results: dict[tuple[str, int], Any]) -> None:
    assert results[name, 1] == results[name, 3]
