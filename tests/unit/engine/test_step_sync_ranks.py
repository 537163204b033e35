"""With `batch_norm: sync`, what ranks tell and do is the same on any number of them."""

from typing import Any

import pytest

import ranks_sync
from samestep import launch
from samestep.runtime.launch import RankError

RANKS = [1, 3, 4, 8]
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> dict[int, Found]:
    """What every rank found in every check, by the number of ranks."""
    return {ranks: launch(ranks_sync.run_checks, processes=ranks) for ranks in RANKS}


def by_all(found: dict[int, Found], check: str) -> list[Any]:
    """What all ranks of all worlds found."""
    return [value for ranks in RANKS for value in found[ranks][check]]


def test_a_bad_loss_is_traced_to_the_same_shards(found: dict[int, Found]) -> None:
    told = by_all(found, "stops loss")
    assert {text.splitlines()[0] for text, _ in told} == {
        "step 2: the loss of shards 1, 7 is not finite (loss nan; samples 102, 103, 116, 117, 118)"
    }
    assert all(unchanged for _, unchanged in told)


def test_a_bad_gradient_is_traced_to_the_same_shards(found: dict[int, Found]) -> None:
    told = by_all(found, "stops gradient")
    (said,) = {text.splitlines()[0] for text, _ in told}
    assert said.startswith("step 2: the gradient of parameter ")
    assert said.endswith("is not finite, from shards 1, 7 (samples 102, 103, 116, 117, 118)")
    assert all(unchanged for _, unchanged in told)


def test_ranks_begin_equal_and_batches_may_leave_some_without_samples(found: dict[int, Found]) -> None:
    states = [state for state, _ in by_all(found, "small")]
    assert all(state == states[0] for state in states)


def test_the_strategy_goes_by_the_name_of_its_layout(found: dict[int, Found]) -> None:
    for ranks in RANKS:
        assert {name for _, name in found[ranks]["small"]} == {"single" if ranks == 1 else "ddp"}


@pytest.mark.parametrize(("check", "other"), [("apart", 7), ("apart by halves", 4)])
def test_shards_of_other_ranks_at_other_layers_are_named(found: dict[int, Found], check: str, other: int) -> None:
    told = by_all(found, check)
    assert len(set(told)) == 1
    assert told[0][0] == (
        f"shard 0 is at the forward of the norm layer 'one' while shard {other} is at the forward of the norm layer "
        "'two'"
    )
    assert all(told[0])


def test_models_of_different_shapes_are_refused(found: dict[int, Found]) -> None:
    for ranks in RANKS[1:]:
        assert all(
            "has other parameters or buffers than another rank's" in text for text in found[ranks]["other shapes"]
        )


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_batch_of_one_sample_is_refused(ranks: int) -> None:
    with pytest.raises(RankError, match="one value a channel from the whole global batch"):
        launch(ranks_sync.step_of_one_sample, processes=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_failure_of_one_shard_ends_the_run_with_its_cause(ranks: int) -> None:
    with pytest.raises(RankError, match="too large"):
        launch(ranks_sync.step_that_fails, processes=ranks)
