"""One process or many: under `exact` the same bits, under `fast` the same to rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks_parity
from ranks_parity import CASES, DOUBLE, SIZE, STEPS
from samestep import launch
from samestep.checkpoint.state import MODEL, OPTIMIZER, STATE
from samestep.checkpoint.store import CheckpointFolder

RANKS = [1, 2, 3, 4, 5, 8]
FAST_RANKS = [1, 3, 4, 8]
WORKERS = {3: 1}  # loader processes a rank, in one of the worlds: they must not matter
Outcomes = dict[int, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def exact() -> Outcomes:
    return {ranks: launch(ranks_parity.train, CASES, WORKERS.get(ranks, 0), processes=ranks) for ranks in RANKS}


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, Any]]]:
    """One process in float64."""
    return launch(ranks_parity.train, DOUBLE, 0, processes=1)


@pytest.fixture(scope="module")
def fast() -> Outcomes:
    cases = {name: replace(case, reduction="fast") for name, case in DOUBLE.items()}
    return {ranks: launch(ranks_parity.train, cases, 0, processes=ranks) for ranks in FAST_RANKS}


@pytest.mark.parametrize("case", CASES)
def test_exact_leads_to_the_same_bits_on_any_number_of_ranks(exact: Outcomes, case: str) -> None:
    alone = exact[1][case][0]
    assert alone["bits"].keys() == {MODEL, OPTIMIZER, STATE}
    for ranks in RANKS:
        assert [found["bits"] for found in exact[ranks][case]] == [alone["bits"]] * ranks, ranks


@pytest.mark.parametrize("case", CASES)
def test_exact_tells_the_same_losses_to_the_last_digit(exact: Outcomes, case: str) -> None:
    alone = exact[1][case][0]["losses"]
    assert len(alone) == STEPS
    for ranks in RANKS:
        assert [found["losses"] for found in exact[ranks][case]] == [alone] * ranks, ranks


@pytest.mark.parametrize("case", CASES)
def test_exact_evaluates_the_same_to_the_last_digit(exact: Outcomes, case: str) -> None:
    alone = exact[1][case][0]["evaluation"]
    assert alone["samples"] == SIZE
    assert alone.keys() == {"loss", "samples", "hits"}
    for ranks in RANKS:
        assert [found["evaluation"] for found in exact[ranks][case]] == [alone] * ranks, ranks


def test_these_trainings_learn_and_differ(exact: Outcomes) -> None:
    """Else the tests above would hold of a program that does nothing."""
    found = {case: exact[1][case][0] for case in CASES}
    assert len({outcome["bits"][MODEL] for outcome in found.values()}) == len(CASES)
    for case, outcome in found.items():
        assert outcome["slots"]
        assert sum(outcome["losses"][3:]) < sum(outcome["losses"][:3]), case


@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_leads_to_the_same_weights_to_rounding(
    fast: Outcomes, reference: dict[str, list[dict[str, Any]]], case: str
) -> None:
    expected = torch.tensor(reference[case][0]["weights"], dtype=torch.float64)
    for ranks in FAST_RANKS:
        for found in fast[ranks][case]:
            distance = (torch.tensor(found["weights"], dtype=torch.float64) - expected).norm() / expected.norm()
            assert distance < 1e-12, ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_tells_the_same_losses_to_rounding(
    fast: Outcomes, reference: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for ranks in FAST_RANKS:
        for found in fast[ranks][case]:
            assert found["losses"] == pytest.approx(reference[case][0]["losses"], rel=1e-12), ranks
            assert found["evaluation"] == pytest.approx(reference[case][0]["evaluation"], rel=1e-12), ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_leads_to_the_same_bits_on_all_ranks_of_a_world(fast: Outcomes, case: str) -> None:
    for ranks in FAST_RANKS:
        assert len({found["bits"][MODEL] for found in fast[ranks][case]}) == 1


@pytest.mark.parametrize("case", ["images fp16", "sentences adamw", "branches sync"])
def test_resuming_on_other_numbers_of_ranks_leads_to_the_same_bits(tmp_path: Path, case: str) -> None:
    """Breaks within an epoch and at its end."""
    whole, broken = CheckpointFolder(tmp_path / "whole"), CheckpointFolder(tmp_path / "broken")
    launch(ranks_parity.train_in_part, CASES[case], whole.path, STEPS, processes=1)
    for ranks, steps in [(3, 2), (1, 3), (4, 4), (2, STEPS)]:
        launch(ranks_parity.train_in_part, CASES[case], broken.path, steps, processes=ranks)
    for name in (MODEL, OPTIMIZER, STATE):
        assert (broken.find("last") / name).read_bytes() == (whole.find("last") / name).read_bytes(), name
