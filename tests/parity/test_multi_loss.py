"""A loss with differently counted terms equals plain torch on any number of ranks."""

from typing import Any

import pytest
import torch

from helpers.models import seeded
from samestep import launch
from samestep.data.order import global_order
from workers import losses as ranks_losses
from workers.losses import BATCH, RATE, SEED, SIZE, STEPS, Lines, TwoOutputs, padded, plain_loss

RANKS = [1, 2, 3, 4]
ByRank = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> dict[int, ByRank]:
    """Return the results of every check by the number of ranks."""
    return {ranks: launch(ranks_losses.run_checks, processes=ranks) for ranks in RANKS}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Return the same training in plain torch, without microbatches."""
    data, model = Lines(), seeded(1, TwoOutputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses: list[float] = []
    for epoch in range(2):
        order = global_order(SIZE, seed=SEED, epoch=epoch, shuffle=True)
        for start in range(0, SIZE, BATCH):
            optimizer.zero_grad()
            loss = plain_loss(model, *padded([data[int(index)] for index in order[start : start + BATCH]]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert len(losses) == STEPS
    weights = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    with torch.no_grad():
        evaluation = float(plain_loss(model, *padded([data[index] for index in range(SIZE)])))
    return {"losses": losses, "weights": weights, "evaluation": evaluation}


def test_exact_gives_the_same_bits_on_any_number_of_ranks(results: dict[int, ByRank]) -> None:
    alone = results[1]["exact"][0]
    for ranks in RANKS:
        assert repr(results[ranks]["exact"]) == repr([alone] * ranks), ranks  # as text, because NaN differs from itself


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_steps_equal_those_of_plain_torch(
    results: dict[int, ByRank], reference: dict[str, Any], reduction: str
) -> None:
    for ranks in RANKS:
        for result in results[ranks][reduction]:
            assert result["losses"] == pytest.approx(reference["losses"], rel=1e-12), ranks
            assert result["counts"] == 2 * [16, 16, 5]
            distance = (torch.tensor(result["weights"], dtype=torch.float64) - reference["weights"]).norm()
            assert distance / reference["weights"].norm() < 1e-12, ranks


def test_evaluation_equals_that_of_all_samples_at_once(results: dict[int, ByRank], reference: dict[str, Any]) -> None:
    """Each term has an entry; a term that counts nothing is NaN and adds nothing to the loss."""
    values = results[3]["exact"][0]["evaluation"]
    assert values.keys() == {
        "loss",
        "samples",
        *(f"loss_{name}" for name in ("tokens", "weighted", "length", "rare", "penalty")),
        "close_lengths",
    }
    assert values["samples"] == SIZE
    assert values["loss"] == pytest.approx(reference["evaluation"], rel=1e-12)
    assert str(values["loss_rare"]) == "nan"
    terms = [("tokens", 1.0), ("weighted", 0.5), ("length", 3.0), ("penalty", 0.01)]
    assert values["loss"] == pytest.approx(sum(weight * values[f"loss_{name}"] for name, weight in terms), rel=1e-12)


def test_negative_count_is_refused_equally_on_all_ranks(results: dict[int, ByRank]) -> None:
    ((code, value),) = {error for ranks in RANKS for error in results[ranks]["negative count"]}
    assert code == "E_LOSS"
    assert value.startswith("loss term length counted -1.0 in microbatch ")
