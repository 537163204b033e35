"""With `batch_norm: sync`, results and errors are the same on any number of ranks."""

from typing import Any

import pytest

from samestep import launch
from samestep.launcher.launch import RankError
from workers import sync as ranks_sync

RANKS = [1, 3, 4, 8]
ByRank = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> dict[int, ByRank]:
    """Return the results of every check by the number of ranks."""
    return {ranks: launch(ranks_sync.run_checks, processes=ranks) for ranks in RANKS}


def all_ranks(results: dict[int, ByRank], check: str) -> list[Any]:
    """Return the results of `check` on all ranks of all worlds."""
    return [value for ranks in RANKS for value in results[ranks][check]]


def test_bad_loss_is_traced_to_the_same_microbatches(results: dict[int, ByRank]) -> None:
    errors = all_ranks(results, "stop loss")
    (title,) = {text.splitlines()[0] for text, _ in errors}
    assert "microbatches 1, 7 " in title
    assert title.endswith("samples 102, 103, 116, 117, 118) [E_NONFINITE]")
    assert all(unchanged for _, unchanged in errors)


def test_bad_gradient_is_traced_to_the_same_microbatches(results: dict[int, ByRank]) -> None:
    errors = all_ranks(results, "stop gradient")
    (title,) = {text.splitlines()[0] for text, _ in errors}
    assert title.startswith("step 2: the gradient of parameter ")
    assert title.endswith("from microbatches 1, 7 (samples 102, 103, 116, 117, 118) [E_NONFINITE]")
    assert all(unchanged for _, unchanged in errors)


def test_small_batches_give_the_same_bits_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    states = [state for state, _ in all_ranks(results, "small batches")]
    assert all(state == states[0] for state in states)


def test_strategy_has_the_name_of_its_mesh(results: dict[int, ByRank]) -> None:
    for ranks in RANKS:
        assert {name for _, name in results[ranks]["small batches"]} == {"single" if ranks == 1 else "ddp"}


@pytest.mark.parametrize(("check", "other"), [("last microbatch", 7), ("second half", 4), ("last microbatch later", 7)])
def test_microbatches_of_other_ranks_at_other_layers_are_reported(
    results: dict[int, ByRank], check: str, other: int
) -> None:
    ((code, value),) = set(all_ranks(results, check))
    assert code == "E_NORM_LAYER"
    assert value == (
        "microbatch 0 is at the forward of the norm layer 'one' "
        f"while microbatch {other} is at the forward of the norm layer 'two'"
    )


@pytest.mark.parametrize("check", ["skipped layer", "skipped layer later"])
def test_skipped_layer_of_another_rank_is_reported(results: dict[int, ByRank], check: str) -> None:
    # The only microbatch of a rank does not begin its backward before all others; the first step is in lockstep.
    place = {1: "done", 3: "done", 4: "done", 8: "at the end of its forward" if "later" in check else "done"}
    for ranks in RANKS:
        error = f"microbatch 0 is at the forward of the norm layer 'two' while microbatch 7 is {place[ranks]}"
        assert set(results[ranks][check]) == {("E_NORM_LAYER", error)}


def test_models_of_different_shapes_are_refused(results: dict[int, ByRank]) -> None:
    for ranks in RANKS[1:]:
        assert set(results[ranks]["different models"]) == {"E_RANK_MISMATCH"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_batch_of_one_sample_is_refused(ranks: int) -> None:
    with pytest.raises(RankError, match="E_NORM_LAYER"):
        launch(ranks_sync.step_of_one_sample, processes=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_failure_of_one_microbatch_is_reported(ranks: int) -> None:
    with pytest.raises(RankError, match="too large"):
        launch(ranks_sync.failing_step, processes=ranks)
