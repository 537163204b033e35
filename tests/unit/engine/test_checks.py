"""Ranks that drift apart, or go different ways, are stopped with their names; those that do not are left alone."""

from typing import Any

import pytest

import ranks_checks
from samestep import launch
from samestep.runtime.launch import RankError

Found = dict[str, list[Any]]
TEN = "after step 10, rank 2 no longer holds what ranks 0, 1 and 3 hold; they agreed last after step 5"


@pytest.fixture(scope="module")
def drifts() -> Found:
    """What four ranks found when rank 2 changed something."""
    found: Found = launch(ranks_checks.run_drifts, (2,), processes=4)
    return found


def told(found: list[Any]) -> tuple[int, list[str]]:
    """What all ranks found, which is the same; the lines of it."""
    assert all(each == found[0] for each in found)
    steps, text = found[0]
    return steps, text.splitlines()


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        ("parameter", ["parameter 4.weight"]),
        ("averaged buffer", ["buffer 1.running_mean, as a step found it"]),
        ("other buffer", ["buffer table"]),
    ],
)
def test_a_change_is_told_with_rank_tensor_and_steps(drifts: Found, change: str, tensors: list[str]) -> None:
    steps, lines = told(drifts[change])
    assert steps == 10
    assert lines[0] == TEN
    assert lines[1].strip().startswith(f"{len(tensors)} of ")
    assert [line.strip() for line in lines[2 : 2 + len(tensors)]] == tensors
    assert lines[-2].startswith("  rule: ")
    assert "a checkpoint of step 5 or before" in lines[-1]


def test_optimizer_state_is_told(drifts: Found) -> None:
    steps, lines = told(drifts["optimizer"])
    assert (steps, lines[0]) == (10, TEN)
    assert "    optimizer exp_avg_sq of 0.weight" in lines


def test_many_tensors_are_counted(drifts: Found) -> None:
    steps, lines = told(drifts["learning rate"])
    assert (steps, lines[0]) == (10, TEN)
    assert lines[5] == "    and 3 more"


def test_ranks_that_agree_are_left_alone(drifts: Found) -> None:
    assert told(drifts["none"]) == (0, [])


def test_ranks_that_begin_apart_make_no_step(drifts: Found) -> None:
    steps, lines = told(drifts["from the start"])
    assert steps == 0
    assert lines[0] == "after step 0, rank 1 no longer holds what ranks 0, 2 and 3 hold; they never agreed"
    assert "checkpoint" not in lines[-1]


def test_a_check_can_be_asked_for(drifts: Found) -> None:
    assert len(set(drifts["asked"])) == 1
    assert drifts["asked"][0].startswith("after step 1, rank 0 no longer holds what ranks 1, 2 and 3 hold; they agreed")


def test_engines_that_disagree_on_checks_are_refused(drifts: Found) -> None:
    assert set(drifts["disagrees"]) == {
        "check_every differs between ranks: 1, 2, 3, 4\n"
        "  rule: the same on every rank\n"
        "  do:   give every rank's engine the same check_every"
    }


def test_the_store_does_not_grow(drifts: Found) -> None:
    assert all(few <= 3 and many <= 3 for few, many in drifts["entries"])


@pytest.mark.parametrize("ranks", [(1,), (0,)])
def test_of_two_ranks_nobody_knows_which_is_right(ranks: tuple[int, ...]) -> None:
    found: Found = launch(ranks_checks.run_drifts, ranks, processes=2)
    steps, lines = told(found["parameter"])
    assert steps == 10
    assert lines[0] == (
        "after step 10, ranks 0 and 1 no longer hold the same, and it cannot be told which of them is right; "
        "they agreed last after step 5"
    )


@pytest.mark.parametrize("processes", [2, 4])
def test_checks_change_no_bit_of_a_correct_program(processes: int) -> None:
    plain, checked = (launch(ranks_checks.run_trained, every, processes=processes) for every in (None, 2))
    assert checked == plain


THIRD = "after engine.step 3, rank 2 went another way than the others:"
SUM = "all_reduce (sum) of 3 float32"


@pytest.mark.parametrize(
    ("fault", "first", "odd", "others"),
    [
        ("skipped", THIRD, "rank 2: engine.step 4", f"ranks 0, 1 and 3: {SUM}"),
        ("extra", THIRD, f"rank 2: {SUM}", "ranks 0, 1 and 3: engine.step 4"),
        ("other", THIRD, "rank 2: broadcast of 3 float32 from rank 0", f"ranks 0, 1 and 3: {SUM}"),
        ("other length", THIRD, "rank 2: all_reduce (sum) of 4 float32", f"ranks 0, 1 and 3: {SUM}"),
        ("other operation", THIRD, "rank 2: all_reduce (max) of 3 float32", f"ranks 0, 1 and 3: {SUM}"),
        ("not waited for", THIRD, f"rank 2: {SUM}", "ranks 0, 1 and 3: engine.step 4"),
        (
            "evaluation on main",
            THIRD.replace("rank 2", "rank 0"),
            "rank 0: engine.evaluate",
            "ranks 1, 2 and 3: engine.step 4",
        ),
        ("fewer batches", THIRD, "rank 2: end of samestep.start()", "ranks 0, 1 and 3: engine.step 4"),
        (
            "fewer evaluations",
            THIRD.replace("step 3", "step 6"),
            "rank 2: end of samestep.start()",
            "ranks 0, 1 and 3: engine.evaluate",
        ),
    ],
)
def test_another_way_is_told_with_ranks_and_lines(fault: str, first: str, odd: str, others: str) -> None:
    with pytest.raises(RankError) as failed:
        launch(ranks_checks.run_roll_call, fault, processes=4)
    lines = str(failed.value).splitlines()
    assert lines[0] == first
    for line, start in zip(lines[1:3], (odd, others), strict=True):
        what, _, where = line.strip().rpartition(" at ")
        assert what == start
        assert where.rpartition(":")[0].endswith("tests/ranks_checks.py")
    assert lines[3].startswith("  rule: ")
    assert len(lines) == 5
    assert failed.value.exit_code == 1


def test_of_two_ranks_both_ways_are_told() -> None:
    with pytest.raises(RankError, match=r"after engine\.step 3, ranks went different ways:"):
        launch(ranks_checks.run_roll_call, "skipped", processes=2)


def test_a_rank_that_does_not_come_is_told_with_what_it_did_last() -> None:
    with pytest.raises(RankError) as failed:
        launch(ranks_checks.run_roll_call, "asleep", 4.0, processes=4)
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("after engine.step 3, rank 2 did not come to engine.step 4 at ")
    assert lines[0].endswith("within 4 s")
    assert lines[1].strip().startswith("rank 2 did last: engine.step 3 at ")
