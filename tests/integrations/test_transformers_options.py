"""Arguments of the trainer of Transformers, PEFT and TRL: the same bits on any number of processes, or an error."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.forked_ranks import Job, run_jobs

MODULE = "workers.transformers_options"
ALIASES = {"num_steps": "accelerator_config", "include_for_metrics loss": "include_for_metrics"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    folder = tmp_path_factory.mktemp("options")
    jobs = {("works", ranks): Job("works", ranks, {"folder": str(folder / str(ranks))}) for ranks in (1, 3)}
    return dict(zip(jobs, run_jobs(MODULE, *jobs.values(), timeout=230), strict=True))


@pytest.mark.long
def test_arguments_have_the_same_bits_on_any_processes(results: dict[tuple[str, int], Any]) -> None:
    one, three = results["works", 1], results["works", 3]
    assert [name for name in one if one[name] != three[name]] == []
    counted = {values[2] for _, values in one.values() if len(values) == 3}
    assert len(counted) == 1  # all labels, also with dataloader_drop_last
    weights = {name: row[0] for name, row in one.items()}
    assert weights["gradient_checkpointing"] == weights["average_tokens"] == weights["workers"]
    different = ("bf16", "group_by_length", "label_smoothing", "neftune", "optimizer", "average_tokens")
    assert len({weights[name] for name in different}) == len(different)


@pytest.mark.slow
def test_arguments_classes_and_launches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (refused,) = run_jobs(MODULE, Job("refusals", 1, {"folder": str(tmp_path)}))
    for name, (code, text) in refused["named"].items():
        assert code == "E_INTEGRATION", name
        assert ALIASES.get(name, name) in text
    codes = {name: code for name, (code, _) in refused["others"].items()}
    assert codes.pop("none") == codes.pop("by length") == "none"
    assert codes.pop("stream") == "E_LOADER"
    assert set(codes.values()) == {"E_INTEGRATION"}, codes


def _same_on(function: str, folder: Path, *sizes: int) -> Any:
    jobs = [Job(function, size, {"folder": str(folder / str(size))}) for size in sizes]
    first, *others = run_jobs(MODULE, *jobs, timeout=230)
    assert all(other == first for other in others)
    return first


@pytest.mark.long
def test_adapters_of_peft_train_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    result = _same_on("lora", tmp_path, 1, 3)
    assert result["resumed"] == result["weights"]
    assert result["saved"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert result["trained"] == 896


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trainer_of_trl_has_the_same_bits_and_metrics(tmp_path: Path) -> None:
    result = _same_on("sft", tmp_path, 1, 3)
    assert [sorted(entry) for entry in result["history"]] == [
        ["entropy", "grad_norm", "loss", "mean_token_accuracy", "num_tokens"]
    ] * 5
    assert result["evaluated"]["eval_mean_token_accuracy"] > 0
