"""Steps have the same result or error on every rank, and on one rank."""

from typing import Any

import pytest

from samestep import launch
from samestep.launcher.launch import RankError
from workers import step as ranks_step

RANKS = [1, 3, 4]
ByRank = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> dict[int, ByRank]:
    """Return the results of every check by the number of ranks."""
    return {ranks: launch(ranks_step.run_checks, processes=ranks) for ranks in RANKS}


def all_ranks(results: dict[int, ByRank], check: str) -> list[Any]:
    """Return the results of `check` on all ranks of all worlds."""
    return [value for ranks in RANKS for value in results[ranks][check]]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_bad_loss_is_reported_equally_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    errors = all_ranks(results, f"stop {reduction} loss")
    assert {text.splitlines()[0] for text, _ in errors} == {
        "step 2: the loss of microbatches 1, 7 is not finite (loss nan; samples 102, 103, 116, 117, 118) [E_NONFINITE]"
    }
    assert len({text for text, _ in errors}) == 1


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_bad_gradient_is_reported_equally_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    errors = all_ranks(results, f"stop {reduction} gradient")
    assert {text.splitlines()[0] for text, _ in errors} == {
        "step 2: the gradient of parameter scale is not finite, from microbatches 1, 7 "
        "(samples 102, 103, 116, 117, 118) [E_NONFINITE]"
    }
    assert len({text for text, _ in errors}) == 1


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_stop_leaves_every_rank_unchanged(results: dict[int, ByRank], reduction: str, kind: str) -> None:
    assert all(unchanged for _, unchanged in all_ranks(results, f"stop {reduction} {kind}"))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_give_the_same_bits_on_any_number_of_ranks(results: dict[int, ByRank], kind: str) -> None:
    first, *others = all_ranks(results, f"skip exact {kind}")
    assert [skipped for *_, skipped in first[0]] == [False, True, False]
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipped_steps_are_equal_on_all_ranks_with_fast_reduction(results: dict[int, ByRank], kind: str) -> None:
    for ranks in RANKS:
        first, *others = results[ranks][f"skip fast {kind}"]
        assert [skipped for *_, skipped in first[0]] == [False, True, False]
        assert all(other == first for other in others)


def test_loss_scaling_is_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    first, *others = all_ranks(results, "reduced scale")
    skipped = [flag for _, flag in first[0]]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert all(other == first for other in others)


def test_microbatches_draw_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    alone = results[1]["draw"][0]
    assert len(set(alone.values())) == ranks_step.MICROBATCHES
    for ranks in RANKS:
        together = [entry for drawn in results[ranks]["draw"] for entry in drawn.items()]
        assert len(together) == ranks_step.MICROBATCHES
        assert dict(together) == alone


def test_draws_between_steps_are_the_same_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    first, *others = all_ranks(results, "draw between steps")
    assert len(set(first)) == 3
    assert all(other == first for other in others)


def test_stop_request_of_one_rank_reaches_all_ranks(results: dict[int, ByRank]) -> None:
    assert all(stops == [False, True] for stops in all_ranks(results, "stop request"))


def test_save_request_of_rank_0_reaches_all_ranks(results: dict[int, ByRank]) -> None:
    assert all(saves == [False, True, False] for saves in all_ranks(results, "save request"))


@pytest.mark.parametrize("check", ["stopped evaluation", "stopped evaluation of a global loss"])
def test_stop_request_of_one_rank_ends_the_evaluation_on_all_ranks(results: dict[int, ByRank], check: str) -> None:
    first, *others = all_ranks(results, check)
    assert first[0] is None
    assert first[1]["samples"] == 3 * ranks_step.SIZE
    assert all(other == first for other in others)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_unused_parameter_is_refused_on_all_ranks(results: dict[int, ByRank], reduction: str) -> None:
    ((code, value),) = set(all_ranks(results, f"idle parameter {reduction}"))
    assert code == "E_UNUSED_PARAMETER"
    assert value.endswith(": idle")


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(
    ("used", "size"),
    [
        pytest.param([0], 16, id="first"),
        pytest.param([7], 16, id="last"),
        pytest.param([0, 2, 3, 5, 6], 16, id="all but the last of each rank"),
        pytest.param([1, 3, 4, 6, 7], 16, id="all but the first of each rank"),
        pytest.param([2, 5], 3, id="two of three microbatches with samples"),
    ],
)
def test_layer_used_by_some_microbatches_only_is_refused(used: list[int], size: int, reduction: str) -> None:
    with pytest.raises(RankError, match=r": sometimes.weight, sometimes.bias \[E_UNUSED_PARAMETER\]") as error:
        launch(ranks_step.use_layer_in, used, reduction, size, processes=3)
    assert error.value.exit_code == 2
