"""Unusable samples are skipped, counted and named, with the same bits on any number of ranks."""

import pytest
import torch

import samestep
from samestep.data.order import global_order
from samestep.errors import DataError
from samestep.launcher.launch import launch
from samestep.metrics.metrics import build_metrics
from workers.bad_samples import BATCH, MICROBATCHES, SIZE, Faulty, trained

SINGLE = frozenset({3, 8, 20})
# Both samples of the third microbatch of the first batch, and the last two microbatches of the epoch.
ORDER = [int(index) for index in global_order(SIZE, seed=0, epoch=0, shuffle=True)]
WHOLE_MICROBATCHES = frozenset({*ORDER[4:6], *ORDER[-2:]})


@pytest.mark.parametrize(
    "bad", [SINGLE, pytest.param(WHOLE_MICROBATCHES, marks=pytest.mark.slow)], ids=["some", "whole microbatches"]
)
def test_bits_do_not_depend_on_ranks_and_workers(bad: frozenset[int]) -> None:
    alone = launch(trained, bad, processes=1)
    assert alone[2] == sorted(2 * [f"row {index} is damaged" for index in bad]), "in each epoch"
    assert alone[1]["samples"] == SIZE - len(bad)
    assert launch(trained, bad, 1, processes=3) == alone


def test_mean_loss_of_a_microbatch_counts_the_remaining_samples() -> None:
    expected = launch(trained, WHOLE_MICROBATCHES, processes=1)
    assert launch(trained, WHOLE_MICROBATCHES, 0, True, processes=3) == expected, (
        "sum and count, or the mean of a microbatch"
    )


def test_evaluation_without_unusable_samples(alone: samestep.World) -> None:
    """Evaluation equals that of a dataset without the unusable samples."""
    model = torch.nn.Linear(6, 4)
    engine = samestep.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), samestep.cross_entropy, world=alone)
    metrics = build_metrics(("accuracy",), 4)
    skipping = samestep.loader(
        Faulty(WHOLE_MICROBATCHES), batch_size=BATCH, microbatches=MICROBATCHES, world=alone, bad_samples="skip"
    )
    rest = torch.utils.data.Subset(Faulty(frozenset()), [i for i in range(SIZE) if i not in WHOLE_MICROBATCHES])  # type: ignore[arg-type, var-annotated]
    others = samestep.loader(rest, batch_size=BATCH, microbatches=MICROBATCHES, world=alone)
    values, expected = engine.evaluate(skipping, metrics), engine.evaluate(others, metrics)
    assert values["samples"] == expected["samples"] == SIZE - len(WHOLE_MICROBATCHES)
    assert values["accuracy"] == expected["accuracy"]
    assert values["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    microbatches = [microbatch for batch in skipping.complete_epoch() for microbatch in batch.local_microbatches]
    assert {index for microbatch in microbatches for index in microbatch.left_out} == WHOLE_MICROBATCHES


def test_a_dataset_without_usable_samples_raises(alone: samestep.World) -> None:
    nothing = Faulty(frozenset(range(SIZE)))
    with pytest.raises(DataError, match=f"none of the {SIZE} samples can be used"):
        next(
            iter(samestep.loader(nothing, batch_size=BATCH, microbatches=MICROBATCHES, world=alone, bad_samples="skip"))
        )
