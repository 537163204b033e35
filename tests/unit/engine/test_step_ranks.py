"""A step ends the same way on every rank, and as it would on one."""

from typing import Any

import pytest

import ranks_step
from samestep import launch
from samestep.runtime.launch import RankError

RANKS = [1, 3, 4]
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> dict[int, Found]:
    """What every rank found in every check, by the number of ranks."""
    return {ranks: launch(ranks_step.run_checks, processes=ranks) for ranks in RANKS}


def by_all(found: dict[int, Found], check: str) -> list[Any]:
    """What all ranks of all worlds found."""
    return [value for ranks in RANKS for value in found[ranks][check]]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_bad_loss_stops_all_ranks_with_the_same_words(found: dict[int, Found], reduction: str) -> None:
    told = by_all(found, f"stops {reduction} loss")
    assert {text.splitlines()[0] for text, _ in told} == {
        "step 2: the loss of shards 1, 7 is not finite (loss nan; samples 102, 103, 116, 117, 118)"
    }
    assert len({text for text, _ in told}) == 1


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_bad_gradient_stops_all_ranks_with_the_same_words(found: dict[int, Found], reduction: str) -> None:
    told = by_all(found, f"stops {reduction} gradient")
    assert {text.splitlines()[0] for text, _ in told} == {
        "step 2: the gradient of parameter scale is not finite, from shards 1, 7 (samples 102, 103, 116, 117, 118)"
    }
    assert len({text for text, _ in told}) == 1


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_stop_leaves_every_rank_as_it_was(found: dict[int, Found], reduction: str, kind: str) -> None:
    assert all(unchanged for _, unchanged in by_all(found, f"stops {reduction} {kind}"))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipping_is_the_same_on_any_ranks(found: dict[int, Found], kind: str) -> None:
    first, *others = by_all(found, f"skips exact {kind}")
    assert [skipped for *_, skipped in first[0]] == [False, True, False]
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_skipping_is_the_same_on_all_ranks_under_fast(found: dict[int, Found], kind: str) -> None:
    for ranks in RANKS:
        first, *others = found[ranks][f"skips fast {kind}"]
        assert [skipped for *_, skipped in first[0]] == [False, True, False]
        assert all(other == first for other in others)


def test_scaling_is_the_same_on_any_ranks(found: dict[int, Found]) -> None:
    first, *others = by_all(found, "scaled")
    skipped = [was for _, was in first[0]]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert all(other == first for other in others)


def test_shards_draw_the_same_on_any_ranks(found: dict[int, Found]) -> None:
    alone = found[1]["draws"][0]
    assert len(set(alone.values())) == ranks_step.SHARDS
    for ranks in RANKS:
        together = [entry for drawn in found[ranks]["draws"] for entry in drawn.items()]
        assert len(together) == ranks_step.SHARDS
        assert dict(together) == alone


def test_what_is_drawn_outside_of_steps_is_the_same_on_any_ranks(found: dict[int, Found]) -> None:
    first, *others = by_all(found, "draws outside")
    assert len(set(first)) == 3
    assert all(other == first for other in others)


def test_a_request_to_one_rank_is_told_to_all(found: dict[int, Found]) -> None:
    assert all(told == [False, True] for told in by_all(found, "asked to end"))


def test_a_wish_to_save_of_rank_0_is_heard_by_all(found: dict[int, Found]) -> None:
    assert all(told == [False, True, False] for told in by_all(found, "wants saved"))


def test_an_evaluation_that_one_rank_gives_up_is_given_up_by_all(found: dict[int, Found]) -> None:
    first, *others = by_all(found, "given up")
    assert first[0] is None
    assert first[1]["samples"] == 3 * ranks_step.SIZE
    assert all(other == first for other in others)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_an_idle_parameter_is_refused_on_all_ranks(found: dict[int, Found], reduction: str) -> None:
    assert set(by_all(found, f"idle parameter {reduction}")) == {"1 trained parameters took no part in the loss: idle"}


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize(
    ("used", "size"),
    [
        pytest.param([0], 16, id="by the first"),
        pytest.param([7], 16, id="by the last"),
        pytest.param([0, 2, 3, 5, 6], 16, id="by all but each rank's last"),
        pytest.param([1, 3, 4, 6, 7], 16, id="by all but each rank's first"),
        pytest.param([2, 5], 3, id="by all but one of few"),
    ],
)
def test_a_layer_that_only_some_shards_use_ends_the_run(used: list[int], size: int, reduction: str) -> None:
    with pytest.raises(RankError, match=r"2 trained parameters took no part in the loss.*: sometimes") as failed:
        launch(ranks_step.use_a_layer_in, used, reduction, size, processes=3)
    assert failed.value.exit_code == 2
