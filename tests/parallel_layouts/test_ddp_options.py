"""ddp's own settings: buckets change no bit, gradients of 16 bits are equal to rounding, no rank is left waiting."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks_ddp_options
from ranks_ddp_options import OPTIONS, joined, numbers_of
from samestep import launch
from samestep.config import StrategyPart
from samestep.parallel.low_rank import is_made_narrow
from samestep.runtime.crew import RankError
from system import events, here

RANKS = 4
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
Outcomes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """One process, to which every option means the same."""
    return launch(ranks_ddp_options.trained, "plain", processes=1)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(ranks_ddp_options.all_trained, processes=RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_all_ranks_have_the_same_bits(outcomes: Outcomes, option: str) -> None:
    assert len({found["bits"] for found in outcomes[option]}) == 1
    assert all(found["steps"] == outcomes[option][0]["steps"] for found in outcomes[option])


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "1 MB", "25 MB", "many buckets"])
def test_the_size_of_buckets_changes_no_bit(outcomes: Outcomes, reference: dict[str, Any], option: str) -> None:
    found = outcomes[option][0]
    assert found["bits"] == reference["bits"]
    assert (found["steps"], found["evaluation"]) == (reference["steps"], reference["evaluation"])


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "most"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_gradients_of_16_bits_are_equal_to_rounding(
    outcomes: Outcomes, reference: dict[str, Any], hook: str, most: float
) -> None:
    found = outcomes[hook][0]
    assert found["bits"] != reference["bits"], "then nothing would be compressed"
    for (loss, norm), (expected, expected_norm) in zip(found["steps"], reference["steps"], strict=True):
        assert loss == pytest.approx(expected, rel=most)
        assert norm == pytest.approx(expected_norm, rel=10 * most)
    for name, weight in found["weights"].items():
        assert float((weight - reference["weights"][name]).norm() / reference["weights"][name].norm()) < most
    assert found["evaluation"]["loss"] == pytest.approx(reference["evaluation"]["loss"], rel=most)


@pytest.mark.slow
def test_copies_of_a_divided_model_round_too() -> None:
    found = launch(ranks_ddp_options.products_trained, processes=RANKS)
    for name in ("tp", "pp"):
        pairs = zip(found[name], found[f"{name} fp16"], strict=True)
        distance = max(abs(loss - rounded) / loss for (loss, _), (rounded, _) in pairs)
        assert 1e-9 < distance < 2e-3, (name, distance)


@pytest.mark.slow
def test_one_process_sends_nothing_and_rounds_nothing(reference: dict[str, Any]) -> None:
    assert launch(ranks_ddp_options.trained, "fp16", processes=1)["bits"] == reference["bits"]


@pytest.mark.slow
def test_narrow_products_learn_as_well(outcomes: Outcomes, reference: dict[str, Any]) -> None:
    for option in ("powersgd", "powersgd, many buckets"):
        found = outcomes[option][0]
        assert found["bits"] != reference["bits"]
        assert found["evaluation"]["loss"] == pytest.approx(reference["evaluation"]["loss"], rel=0.1)
        # The first forward knows of no gradient yet.
        assert found["steps"][0][0] == reference["steps"][0][0]


@pytest.fixture(scope="module")
def rounded() -> list[dict[str, torch.Tensor]]:
    return launch(ranks_ddp_options.rounded_sums, processes=RANKS)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e9])
def test_16_bits_hold_numbers_of_any_size(rounded: list[dict[str, torch.Tensor]], dtype: str, size: float) -> None:
    summands = torch.stack([numbers_of(rank, torch.float32, size).double() for rank in range(RANKS)])
    for found in rounded:
        error = (found[f"{dtype} {size:g}"].double() - summands.sum(0)).abs()
        # Each summand is rounded once, and each partial sum; what is tiny beside the largest may be lost in fp16.
        allowed = RANKS * ROUNDING[dtype] * summands.abs().sum(0) + 2.0**-36 * summands.abs().max()
        assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", ROUNDING)
def test_what_is_not_finite_stays_so_on_every_rank(rounded: list[dict[str, torch.Tensor]], dtype: str) -> None:
    for found in rounded:
        assert not found[f"{dtype} inf"].isfinite().all()
        assert not found[f"{dtype} nan"].isfinite().all()
        assert found[f"{dtype} zero"].tolist() == [0.0] * 5


@pytest.fixture(scope="module")
def narrow() -> list[dict[str, Any]]:
    return launch(ranks_ddp_options.low_rank_sums, processes=RANKS)


def test_a_sum_that_is_one_narrow_product_comes_whole(narrow: list[dict[str, Any]]) -> None:
    total = torch.stack([found["narrow"][0] for found in narrow]).sum(0)
    for found in narrow:
        torch.testing.assert_close(found["narrow"][1], total, rtol=1e-10, atol=1e-10)


def test_what_is_not_sent_is_kept_to_the_last_digit(narrow: list[dict[str, Any]]) -> None:
    for number in range(3):
        given = torch.stack([found["given"][number] for found in narrow]).sum(0)
        rest = torch.stack([found["rest"][number] for found in narrow]).sum(0)
        for found in narrow:
            sent = found["sent"][number]
            torch.testing.assert_close(sent.flatten() + rest.flatten(), given.flatten(), rtol=0, atol=1e-10)
    assert float(narrow[0]["rest"][0].norm()) > 1, "then nothing was left out"


def test_a_bad_step_spoils_none_after_it(narrow: list[dict[str, Any]]) -> None:
    for found in narrow:
        assert not joined(found["bad"]).isfinite().all()
        assert joined(found["after"]).isfinite().all()
        assert torch.equal(joined(found["after"]), joined(narrow[0]["after"]))


def test_small_and_narrow_parameters_travel_whole() -> None:
    shapes = {(40, 50): True, (30, 4, 9): True, (50,): False, (4, 500): False, (10, 10): False, (0, 50): False}
    assert {shape: is_made_narrow(torch.empty(shape)) for shape in shapes} == shapes
    assert not is_made_narrow(torch.empty(400, 500, dtype=torch.bfloat16))


def test_powersgd_is_refused_where_the_scale_of_gradients_changes() -> None:
    assert launch(ranks_ddp_options.refused, "powersgd", processes=1).startswith("strategy.hook powersgd with step.pre")
    assert launch(ranks_ddp_options.refused, "bf16", processes=1) == ""


UNUSED = {
    "as they are": StrategyPart(),
    "in many buckets": StrategyPart(bucket_mb=0.0001),
    "fp16": StrategyPart(hook="fp16"),
    "powersgd": StrategyPart(hook="powersgd"),
}


@pytest.mark.parametrize(
    "case", ["as they are", *(pytest.param(name, marks=pytest.mark.slow) for name in list(UNUSED)[1:])]
)
def test_a_branch_that_one_shard_does_not_take_ends_the_run_on_all_ranks(case: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as failed:
        launch(ranks_ddp_options.branch_of_one_rank, UNUSED[case], processes=RANKS)
    text = str(failed.value)
    assert "of shard 5, though they did in that of shard 4 before: sometimes.weight, sometimes.bias" in text
    assert failed.value.exit_code == 2
    assert time.monotonic() - began < 100, "nobody waits until a collective gives up"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_groups_of_a_mesh_wait_no_longer_than_they_are_told(kind: str) -> None:
    with pytest.raises(RankError, match=r"gave up after [4-9] s"):
        launch(ranks_ddp_options.late, kind, processes=RANKS)


@pytest.mark.slow
def test_a_run_says_that_its_gradients_are_rounded(tmp_path: Path) -> None:
    options = ["--processes", RANKS, "--set", "strategy.hook=fp16", "epochs=1", "batch_size=256"]
    assert here("train", "digits", *options, "--name", "rounded", cwd=tmp_path) == 0
    run = tmp_path / "runs" / "rounded"
    told = [event["text"] for event in events(run, "note")]
    words = "gradients travel in 16 bits (fp16): equal to rounding"
    assert any(words in text for text in told)
    assert words in json.loads((run / "environment.json").read_text())[0]["remark"]


@pytest.mark.slow
def test_a_certificate_says_that_gradients_are_rounded(tmp_path: Path) -> None:
    short = ["--steps", 2, "--loss-of-shards", "--out", tmp_path / "found"]
    options = ["--processes", f"1,{RANKS}", *short, "--set", "strategy.hook=fp16", "batch_size=256"]
    assert here("verify", "digits", *options, cwd=tmp_path) == 0
    data = json.loads((tmp_path / "found" / "certificate.json").read_text())
    assert data["level"] == "0.1 relative"
    assert any("gradients travel in 16 bits (fp16)" in note for note in data["notes"])
    assert data["comparisons"][0]["quantities"]["gradients"] != "bits"


def test_an_approximation_is_not_verified_without_a_distance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("verify", "digits", "--processes", "1,4", "--set", "strategy.hook=powersgd", cwd=tmp_path) == 2
    assert "strategy.hook powersgd without --tolerance" in capsys.readouterr().err
