"""Samples that cannot be used are left out, counted and named, the same on any number of ranks."""

import pytest
import torch

import samestep
from ranks_bad_samples import BATCH, SHARDS, SIZE, Faulty, stopped, trained
from samestep.data.order import global_order
from samestep.errors import DataError
from samestep.metrics import build_metrics
from samestep.runtime.launch import launch

SOME = frozenset({3, 8, 20})
# Both samples of the third shard of the first batch, and the last two of the epoch, a shard each.
ORDER = [int(index) for index in global_order(SIZE, seed=0, epoch=0, shuffle=True)]
WHOLE_SHARDS = frozenset({*ORDER[4:6], *ORDER[-2:]})


@pytest.mark.parametrize(
    "bad", [SOME, pytest.param(WHOLE_SHARDS, marks=pytest.mark.slow)], ids=["some", "whole shards"]
)
def test_bits_do_not_depend_on_ranks_and_workers(bad: frozenset[int]) -> None:
    alone = launch(trained, bad, processes=1)
    assert alone[2] == sorted(2 * [f"row {index} is torn" for index in bad]), "in each epoch"
    assert alone[1]["samples"] == SIZE - len(bad)
    assert launch(trained, bad, 1, processes=3) == alone


def test_a_mean_of_a_shard_counts_what_is_left() -> None:
    expected = launch(trained, WHOLE_SHARDS, processes=1)
    assert launch(trained, WHOLE_SHARDS, 0, True, processes=3) == expected, "sum and count, or the mean of a shard"


def test_evaluation_is_that_of_the_others(alone: samestep.World) -> None:
    """As if the dataset had never had them."""
    model = torch.nn.Linear(6, 4)
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.cross_entropy, world=alone)
    metrics = build_metrics(("accuracy",), 4, alone.device)
    skipping = samestep.loader(Faulty(WHOLE_SHARDS), batch_size=BATCH, shards=SHARDS, world=alone, bad_samples="skip")
    rest = torch.utils.data.Subset(Faulty(frozenset()), [i for i in range(SIZE) if i not in WHOLE_SHARDS])  # type: ignore[arg-type, var-annotated]
    others = samestep.loader(rest, batch_size=BATCH, shards=SHARDS, world=alone)
    found, expected = engine.evaluate(skipping, metrics), engine.evaluate(others, metrics)
    assert found["samples"] == expected["samples"] == SIZE - len(WHOLE_SHARDS)
    assert found["accuracy"] == expected["accuracy"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_the_first_one_stops_by_default() -> None:
    assert launch(stopped, SOME, processes=1) == "row 3 is torn\n  rule: rows are whole\n  do:   remove it"


def test_a_dataset_of_which_nothing_can_be_used_is_refused(alone: samestep.World) -> None:
    nothing = Faulty(frozenset(range(SIZE)))
    with pytest.raises(DataError, match=f"none of the {SIZE} samples can be used"):
        next(iter(samestep.loader(nothing, batch_size=BATCH, shards=SHARDS, world=alone, bad_samples="skip")))
