"""Ranks with different state or different collectives are reported; correct programs run unchanged."""

from typing import Any

import pytest

from samestep import launch
from samestep.launcher.launch import RankError
from workers import checks as ranks_checks

ByRank = dict[str, list[Any]]
AFTER_TEN = "after step 10, rank 2 differs from ranks 0, 1 and 3; last equal after step 5 [E_RANK_MISMATCH]"


@pytest.fixture(scope="module")
def results() -> ByRank:
    """Results of four ranks of which rank 2 changes its state."""
    by_rank: ByRank = launch(ranks_checks.run_changes, (2,), processes=4)
    return by_rank


def report(by_rank: list[Any]) -> tuple[int, list[str]]:
    """Return the steps and the lines of the error, which are equal on all ranks."""
    assert all(result == by_rank[0] for result in by_rank)
    steps, text = by_rank[0]
    return steps, text.splitlines()


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ("parameter", "parameter 4.weight"),
        ("averaged buffer", "buffer 1.running_mean at the beginning of a step"),
        ("other buffer", "buffer table"),
    ],
)
def test_change_of_a_tensor_is_reported_with_rank_and_steps(results: ByRank, change: str, tensor: str) -> None:
    steps, lines = report(results[change])
    assert (steps, lines[0]) == (10, AFTER_TEN)
    assert lines[1].strip().startswith("1 of ")
    assert lines[2].strip() == tensor
    assert lines[-2].startswith("  expected: ")
    assert "a checkpoint of step 5 or before" in lines[-1]


def test_change_of_optimizer_state_is_reported(results: ByRank) -> None:
    steps, lines = report(results["optimizer"])
    assert (steps, lines[0]) == (10, AFTER_TEN)
    assert "    optimizer exp_avg_sq of 0.weight" in lines


def test_long_list_of_tensors_is_shortened(results: ByRank) -> None:
    steps, lines = report(results["all parameters"])
    assert (steps, lines[0]) == (10, AFTER_TEN)
    assert lines[5] == "    and 3 more"


def test_equal_ranks_raise_no_error(results: ByRank) -> None:
    assert report(results["none"]) == (0, [])


def test_different_initial_state_is_reported_before_the_first_step(results: ByRank) -> None:
    steps, lines = report(results["initial state"])
    assert steps == 0
    assert lines[0] == "after step 0, rank 1 differs from ranks 0, 2 and 3; never equal [E_RANK_MISMATCH]"
    assert "checkpoint" not in lines[-1]


def test_explicit_check_reports_a_change(results: ByRank) -> None:
    (text,) = set(results["explicit check"])
    assert text.startswith("after step 1, rank 0 differs from ranks 1, 2 and 3; last equal after step 1")


def test_different_check_every_is_refused(results: ByRank) -> None:
    assert set(results["different check_every"]) == {("E_VALUE", "check_every differs between ranks: 1, 2, 3, 4")}


@pytest.mark.parametrize("ranks", [(1,), (0,)])
def test_two_ranks_have_no_majority(ranks: tuple[int, ...]) -> None:
    by_rank: ByRank = launch(ranks_checks.run_changes, ranks, processes=2)
    steps, lines = report(by_rank["parameter"])
    assert steps == 10
    assert lines[0].startswith("after step 10, ranks 0 and 1 differ, with no majority; last equal after step 5")


@pytest.mark.parametrize("processes", [2, 4])
def test_checks_change_no_bit_of_a_correct_program(processes: int) -> None:
    plain, checked = (launch(ranks_checks.run_training, every, processes=processes) for every in (None, 2))
    assert checked == plain


AFTER = "after engine.step {}, rank {} diverged from the other ranks [E_RANK_DESYNC]"


@pytest.mark.parametrize(
    ("fault", "title", "odd", "others"),
    [
        ("evaluation on main", AFTER.format(3, 0), "rank 0: engine.evaluate", "ranks 1, 2 and 3: engine.step 4"),
        (
            "fewer batches",
            AFTER.format(3, 2),
            "rank 2: end of samestep.start()",
            "ranks 0, 1 and 3: engine.step 4",
        ),
        (
            "fewer evaluations",
            AFTER.format(6, 2),
            "rank 2: end of samestep.start()",
            "ranks 0, 1 and 3: engine.evaluate",
        ),
    ],
)
def test_different_operations_are_reported_with_ranks_and_lines(fault: str, title: str, odd: str, others: str) -> None:
    with pytest.raises(RankError) as error:
        launch(ranks_checks.run_operation_fault, fault, processes=4)
    lines = str(error.value).splitlines()
    assert lines[0] == title
    for line, expected in zip(lines[1:3], (odd, others), strict=True):
        operation, _, location = line.strip().rpartition(" at ")
        assert operation == expected
        assert location.rpartition(":")[0].endswith("tests/workers/checks.py")
    assert error.value.exit_code == 1


def test_different_operations_of_two_ranks_have_no_majority() -> None:
    with pytest.raises(RankError, match=r"after engine\.step 3, ranks diverged"):
        launch(ranks_checks.run_operation_fault, "evaluation on main", processes=2)
