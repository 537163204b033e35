"""Any number of processes: equal bits with `exact`, equal to rounding with `fast`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep import launch
from samestep.checkpoint.state import MODEL, OPTIMIZER, STATE
from samestep.checkpoint.store import CheckpointFolder
from workers import parity as ranks_parity
from workers.parity import CASES, DOUBLE, SIZE, STEPS

RANKS = [1, 3, 4]
MORE_RANKS = [1, 2, 5, 8]
FAST_RANKS = [1, 3, 4, 8]
WORKERS = {3: 1}  # loader processes per rank: one of the worlds has one, without effect on results
Outcomes = dict[int, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module", params=[RANKS, pytest.param(MORE_RANKS, marks=pytest.mark.long)], ids=str)
def exact(request: pytest.FixtureRequest) -> Outcomes:
    worlds = request.param
    return {ranks: launch(ranks_parity.train, CASES, WORKERS.get(ranks, 0), processes=ranks) for ranks in worlds}


@pytest.fixture(scope="module")
def reference() -> dict[str, list[dict[str, Any]]]:
    """Return the outcomes of one process in float64."""
    return launch(ranks_parity.train, DOUBLE, 0, processes=1)


@pytest.fixture(scope="module")
def fast() -> Outcomes:
    cases = {name: replace(case, reduction="fast") for name, case in DOUBLE.items()}
    return {ranks: launch(ranks_parity.train, cases, 0, processes=ranks) for ranks in FAST_RANKS}


@pytest.mark.parametrize("case", CASES)
def test_exact_gives_the_same_bits_on_any_number_of_ranks(exact: Outcomes, case: str) -> None:
    alone = exact[1][case][0]
    assert alone["bits"].keys() == {MODEL, OPTIMIZER, STATE}
    for ranks in exact:
        assert [outcome["bits"] for outcome in exact[ranks][case]] == [alone["bits"]] * ranks, ranks


@pytest.mark.parametrize("case", CASES)
def test_exact_gives_equal_evaluations(exact: Outcomes, case: str) -> None:
    alone = exact[1][case][0]["evaluation"]
    assert alone["samples"] == SIZE
    assert alone.keys() == {"loss", "samples", "hits"}
    for ranks in exact:
        assert [outcome["evaluation"] for outcome in exact[ranks][case]] == [alone] * ranks, ranks


def test_trainings_reduce_the_loss_and_differ(exact: Outcomes) -> None:
    """Control: the tests above would also hold for a program without training."""
    outcomes = {case: exact[1][case][0] for case in CASES}
    assert len({outcome["bits"][MODEL] for outcome in outcomes.values()}) == len(CASES)
    for case, outcome in outcomes.items():
        assert outcome["has_optimizer_state"]
        assert sum(outcome["losses"][3:]) < sum(outcome["losses"][:3]), case


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_gives_equal_weights_except_for_rounding(
    fast: Outcomes, reference: dict[str, list[dict[str, Any]]], case: str
) -> None:
    expected = torch.tensor(reference[case][0]["weights"], dtype=torch.float64)
    for ranks in FAST_RANKS:
        for outcome in fast[ranks][case]:
            distance = (torch.tensor(outcome["weights"], dtype=torch.float64) - expected).norm() / expected.norm()
            assert distance < 1e-12, ranks


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_gives_equal_losses_except_for_rounding(
    fast: Outcomes, reference: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for ranks in FAST_RANKS:
        for outcome in fast[ranks][case]:
            assert outcome["losses"] == pytest.approx(reference[case][0]["losses"], rel=1e-12), ranks
            assert outcome["evaluation"] == pytest.approx(reference[case][0]["evaluation"], rel=1e-12), ranks


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", DOUBLE)
def test_fast_gives_the_same_bits_on_all_ranks_of_a_world(fast: Outcomes, case: str) -> None:
    for ranks in FAST_RANKS:
        assert len({outcome["bits"][MODEL] for outcome in fast[ranks][case]}) == 1


@pytest.mark.parametrize("case", ["images fp16", "sentences adamw", "branches sync"])
def test_resuming_on_other_numbers_of_ranks_gives_the_same_bits(tmp_path: Path, case: str) -> None:
    """Interruptions are within an epoch and at the end of an epoch."""
    one, resumed = CheckpointFolder(tmp_path / "one"), CheckpointFolder(tmp_path / "resumed")
    launch(ranks_parity.train_in_part, CASES[case], one.path, STEPS, processes=1)
    for ranks, steps in [(3, 2), (1, 3), (4, 4), (2, STEPS)]:
        launch(ranks_parity.train_in_part, CASES[case], resumed.path, steps, processes=ranks)
    for name in (MODEL, OPTIMIZER, STATE):
        assert (resumed.find("last") / name).read_bytes() == (one.find("last") / name).read_bytes(), name
