"""Parts that count differently: what one process computes of whole batches, on any number of ranks."""

from typing import Any

import pytest
import torch

import ranks_losses
from models import seeded
from ranks_losses import BATCH, RATE, SEED, SIZE, STEPS, Lines, TwoAnswers, padded, plain_loss
from samestep import launch
from samestep.data.order import global_order

RANKS = [1, 2, 3, 4]
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> dict[int, Found]:
    """What every rank found in every check, by the number of ranks."""
    return {ranks: launch(ranks_losses.run_checks, processes=ranks) for ranks in RANKS}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The same training in plain torch: no shards, no sums and counts."""
    data, model = Lines(), seeded(1, TwoAnswers)
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
        whole = float(plain_loss(model, *padded([data[index] for index in range(SIZE)])))
    return {"losses": losses, "weights": weights, "evaluation": whole}


def test_exact_leads_to_the_same_bits_on_any_number_of_ranks(found: dict[int, Found]) -> None:
    alone = found[1]["exact"][0]
    for ranks in RANKS:
        assert repr(found[ranks]["exact"]) == repr([alone] * ranks), ranks  # as text, NaN is what NaN is


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_steps_are_those_of_whole_batches_in_plain_torch(
    found: dict[int, Found], reference: dict[str, Any], reduction: str
) -> None:
    for ranks in RANKS:
        for told in found[ranks][reduction]:
            assert told["losses"] == pytest.approx(reference["losses"], rel=1e-12), ranks
            assert told["counts"] == 2 * [16, 16, 5]
            distance = (torch.tensor(told["weights"], dtype=torch.float64) - reference["weights"]).norm()
            assert distance / reference["weights"].norm() < 1e-12, ranks


def test_evaluation_is_that_of_all_samples_at_once(found: dict[int, Found], reference: dict[str, Any]) -> None:
    """Each part has its own entry; what is counted nowhere has no mean and adds nothing."""
    values = found[3]["exact"][0]["evaluation"]
    assert values.keys() == {
        "loss",
        "samples",
        *(f"loss_{name}" for name in ("tokens", "weighted", "length", "rare", "penalty")),
        "tenths",
    }
    assert values["samples"] == SIZE
    assert values["loss"] == pytest.approx(reference["evaluation"], rel=1e-12)
    assert str(values["loss_rare"]) == "nan"
    parts = [("tokens", 1.0), ("weighted", 0.5), ("length", 3.0), ("penalty", 0.01)]
    assert values["loss"] == pytest.approx(sum(weight * values[f"loss_{name}"] for name, weight in parts), rel=1e-12)


def test_these_trainings_learn(reference: dict[str, Any]) -> None:
    """Else the comparisons above would hold of a program that does nothing."""
    assert sum(reference["losses"][3:]) < 0.9 * sum(reference["losses"][:3])


def test_count_that_cannot_be_is_refused_by_all_ranks_alike(found: dict[int, Found]) -> None:
    told = {text for ranks in RANKS for text in found[ranks]["refused"]}
    (text,) = told
    assert text.startswith("loss part length counted -1.0 in shard ")
    assert "a count is finite and not negative" in text
