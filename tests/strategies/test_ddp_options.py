"""Options of `ddp`: bucket size, gradient compression, timeouts."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.system import events, here
from samestep import launch
from samestep.config import StrategyConfig
from samestep.launcher.failure import RankError
from workers import ddp_options as ranks_ddp_options
from workers.ddp_options import OPTIONS, gradients_of

RANKS = 4
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
Outcomes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Result of one process, the same for every option."""
    return launch(ranks_ddp_options.train, "plain", processes=1)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(ranks_ddp_options.train_all, processes=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_all_ranks_have_the_same_bits(outcomes: Outcomes, option: str) -> None:
    assert len({result["bits"] for result in outcomes[option]}) == 1
    assert all(result["steps"] == outcomes[option][0]["steps"] for result in outcomes[option])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "1 MB", "25 MB", "many buckets"])
def test_the_bucket_size_does_not_change_the_bits(outcomes: Outcomes, reference: dict[str, Any], option: str) -> None:
    result = outcomes[option][0]
    assert result["bits"] == reference["bits"]
    assert (result["steps"], result["evaluation"]) == (reference["steps"], reference["evaluation"])


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_16_bit_gradients_are_equal_to_rounding(
    outcomes: Outcomes, reference: dict[str, Any], hook: str, tolerance: float
) -> None:
    result = outcomes[hook][0]
    assert result["bits"] != reference["bits"], "gradients are not compressed"
    for (loss, norm), (expected, expected_norm) in zip(result["steps"], reference["steps"], strict=True):
        assert loss == pytest.approx(expected, rel=tolerance)
        assert norm == pytest.approx(expected_norm, rel=10 * tolerance)
    for name, weight in result["weights"].items():
        assert float((weight - reference["weights"][name]).norm() / reference["weights"][name].norm()) < tolerance
    assert result["evaluation"]["loss"] == pytest.approx(reference["evaluation"]["loss"], rel=tolerance)


@pytest.mark.long
@pytest.mark.slow
def test_replicas_of_a_divided_model_support_compression() -> None:
    results = launch(ranks_ddp_options.train_divided, processes=RANKS)
    for name in ("tp", "pp"):
        pairs = zip(results[name], results[f"{name} fp16"], strict=True)
        distance = max(abs(loss - rounded) / loss for (loss, _), (rounded, _) in pairs)
        assert 1e-9 < distance < 2e-3, (name, distance)


@pytest.mark.slow
def test_one_process_does_not_compress(reference: dict[str, Any]) -> None:
    assert launch(ranks_ddp_options.train, "fp16", processes=1)["bits"] == reference["bits"]


@pytest.fixture(scope="module")
def sums_16_bit() -> list[dict[str, torch.Tensor]]:
    return launch(ranks_ddp_options.sums_16_bit, processes=RANKS)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e9])
def test_16_bit_sums_of_any_magnitude(sums_16_bit: list[dict[str, torch.Tensor]], dtype: str, size: float) -> None:
    summands = torch.stack([gradients_of(rank, torch.float32, size).double() for rank in range(RANKS)])
    for sums in sums_16_bit:
        error = (sums[f"{dtype} {size:g}"].double() - summands.sum(0)).abs()
        # Each summand and each partial sum is rounded once; in fp16, very small summands may be lost.
        allowed = RANKS * ROUNDING[dtype] * summands.abs().sum(0) + 2.0**-36 * summands.abs().max()
        assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_non_finite_gradients_are_non_finite_on_every_rank(
    sums_16_bit: list[dict[str, torch.Tensor]], dtype: str
) -> None:
    for sums in sums_16_bit:
        assert not sums[f"{dtype} inf"].isfinite().all()
        assert not sums[f"{dtype} nan"].isfinite().all()
        assert sums[f"{dtype} zero"].tolist() == [0.0] * 5


UNUSED = {
    "default": StrategyConfig(),
    "many buckets": StrategyConfig(bucket_mb=0.0001),
    "fp16": StrategyConfig(hook="fp16"),
}


@pytest.mark.parametrize(
    "case", ["default", *(pytest.param(name, marks=pytest.mark.slow) for name in list(UNUSED)[1:])]
)
def test_an_unused_parameter_in_one_microbatch_ends_the_run_on_all_ranks(case: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(ranks_ddp_options.unused_parameter, UNUSED[case], processes=RANKS)
    text = str(error.value)
    assert all(value in text for value in ("microbatch 5", "microbatch 4", "sometimes.weight", "E_UNUSED_PARAMETER"))
    assert error.value.exit_code == 2
    assert time.monotonic() - start < 100, "no rank waits for the timeout of a collective"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_groups_of_a_mesh_have_the_timeout_of_the_world(kind: str) -> None:
    with pytest.raises(RankError, match=r"gave up after \d+ s"):
        launch(ranks_ddp_options.wait_for_missing_rank, kind, processes=RANKS)


@pytest.mark.slow
def test_a_run_reports_compression(tmp_path: Path) -> None:
    options = ["--processes", RANKS, "--set", "strategy.hook=fp16", "epochs=1", "batch_size=256"]
    assert here("train", "digits", *options, "--name", "rounded", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "rounded"
    notes = [event["text"] for event in events(run, "note")]
    expected = "gradients are sent in 16 bits (fp16)"
    assert any(expected in text for text in notes)
    assert expected in json.loads((run / "environment.json").read_text())[0]["remark"]


@pytest.mark.slow
def test_a_certificate_reports_compression(tmp_path: Path) -> None:
    short = ["--steps", 2, "--loss-of-microbatches", "--out", tmp_path / "certificate"]
    options = ["--processes", f"1,{RANKS}", *short, "--set", "strategy.hook=fp16", "batch_size=256"]
    assert here("verify", "digits", *options, cwd=tmp_path) == 0
    data = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    assert data["level"] == "0.1 relative"
    assert any("gradients are sent in 16 bits (fp16)" in note for note in data["notes"])
    assert data["comparisons"][0]["quantities"]["gradients"] != "bits"


def test_forward_functions_reduce_during_backward() -> None:
    alone = launch(ranks_ddp_options.forward_functions, processes=1)
    many = launch(ranks_ddp_options.forward_functions, processes=RANKS)
    assert {name: bits for name, (bits, _) in many.items()} == {name: bits for name, (bits, _) in alone.items()}
    reductions = {name: [count > 0 for count in counts] for name, (_, counts) in many.items()}
    during = [False, True, True, True]  # the first step checks how gradients arrive
    # With 6 microbatches on 4 ranks, a rank may compute fillers, which are not part of a reduction.
    assert reductions == {"plain": during, "function": during, "unequal": [False] * 4}


def test_parameter_that_one_rank_leaves_out_in_a_later_step_is_named() -> None:
    with pytest.raises(RankError, match=r"blocks\.0\.weight.*\[E_UNUSED_PARAMETER\]"):
        launch(ranks_ddp_options.leave_out_parameters, processes=RANKS)


def test_steps_continue_after_the_error_of_an_unused_parameter() -> None:
    losses = launch(ranks_ddp_options.continue_after_unused_parameter, processes=1)
    assert len(losses) == 7
    assert launch(ranks_ddp_options.continue_after_unused_parameter, processes=RANKS) == losses


def test_steps_continue_after_an_unused_layer_while_other_buckets_are_reduced() -> None:
    alone, _ = launch(ranks_ddp_options.continue_after_unused_layer, processes=1)
    losses, reduced = launch(ranks_ddp_options.continue_after_unused_layer, processes=3)
    assert losses == alone and len(losses) == 7
    assert len(reduced) > 1, "the error is raised while buckets wait for their reduction"
