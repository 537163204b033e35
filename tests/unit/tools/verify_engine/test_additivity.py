"""Check of the additivity of losses."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep import Loss, LossTerm, MultiLoss, cross_entropy
from samestep.data.batch import Microbatch
from samestep.tools.verify_engine.causes import additivity_finding, additivity_notes
from samestep.tools.verify_engine.worker import check_additivity

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (6,), generator=GENERATOR)
TOKENS = torch.randint(0, 4, (6, 5), generator=GENERATOR).masked_fill(torch.arange(5) > torch.arange(6)[:, None], -100)
TOKEN_LOGITS = torch.randn(6, 4, 5, generator=GENERATOR)
WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0])


def check(loss: Any, outputs: Any, targets: Any, size: int = 6) -> dict[str, Any]:
    return check_additivity(loss, outputs, Microbatch(2, size, (None, targets)))


def by_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=-100)


RIGHT = {
    "samples": (nn.CrossEntropyLoss(), LOGITS, CLASSES),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, CLASSES),
    "sum and count": (cross_entropy, LOGITS, CLASSES),
    "tokens counted": (cross_entropy, TOKEN_LOGITS, TOKENS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), LOGITS, CLASSES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LOGITS, CLASSES),
    "regression": (nn.MSELoss(), LOGITS, torch.ones(6, 4)),
    "rows of tokens": (cross_entropy, TOKEN_LOGITS.transpose(1, 2).reshape(30, 4), TOKENS.reshape(30)),
    "weights counted": (
        lambda o, t: Loss(functional.cross_entropy(o, t, weight=WEIGHTS, reduction="sum"), WEIGHTS[t].sum()),
        LOGITS,
        CLASSES,
    ),
    "a pair": (lambda o, t: cross_entropy(o[0], t["class"]), (LOGITS, LOGITS), {"class": CLASSES}),
}
WRONG = {
    "mean over tokens": (by_token, TOKEN_LOGITS, TOKENS),
    "weighted mean": (lambda o, t: functional.cross_entropy(o, t, weight=WEIGHTS), LOGITS, CLASSES),
    "a penalty per microbatch": (lambda o, t: Loss(cross_entropy(o, t).sum + 1.0, len(t)), LOGITS, CLASSES),
    "a count of microbatches": (lambda o, t: Loss(cross_entropy(o, t).sum, 1), LOGITS, CLASSES),
    "the largest": (lambda o, t: functional.cross_entropy(o, t, reduction="none").max(), LOGITS, CLASSES),
}


@pytest.mark.parametrize("name", RIGHT)
def test_additive_loss_passes(name: str) -> None:
    result = check(*RIGHT[name])
    assert (result["checked"], result["cuts"]) == (True, [])


@pytest.mark.parametrize("name", WRONG)
def test_non_additive_loss_is_detected(name: str) -> None:
    result = check(*WRONG[name])
    assert result["checked"]
    assert result["microbatch"] == 2
    first = result["cuts"][0]
    assert (first["sum"], first["count"]) != (first["sum_of_pieces"], first["count_of_pieces"])


def test_indivisible_data_are_not_checked() -> None:
    assert not check(cross_entropy, LOGITS, CLASSES, size=1)["checked"]
    assert not check(lambda o, t: o.mean(), torch.tensor(1.0), CLASSES)["checked"]
    assert not check(cross_entropy, LOGITS, [1, 2, 3, 4, 5, 6])["checked"]


def test_terms_of_a_loss_are_checked_separately() -> None:
    tokens = LossTerm("tokens", lambda o, t: cross_entropy(o, t).sum, count=lambda targets: (targets != -100).sum())
    penalty = LossTerm("penalty", lambda o, t: torch.tensor(3.0), count="once")
    assert check(MultiLoss([tokens, penalty]), TOKEN_LOGITS, TOKENS)["cuts"] == []
    wrong = LossTerm("tokens", lambda o, t: by_token(o, t) * len(t))
    assert check(MultiLoss([wrong, penalty]), TOKEN_LOGITS, TOKENS)["cuts"]


def finding(loss: Any, outputs: Any, targets: Any) -> str | None:
    """Return the evidence of a mistake in a loss, if any."""
    result = additivity_finding([{"step": 1, **check(loss, outputs, targets)}])
    return result.evidence[-1] if result else None


def test_mistakes_are_classified() -> None:
    assert finding(*RIGHT["samples"]) is None
    assert "a mean of means" in str(finding(*WRONG["mean over tokens"]))
    assert "a mean of means" in str(finding(*WRONG["weighted mean"]))
    assert "once per microbatch" in str(finding(*WRONG["a penalty per microbatch"]))


def test_loss_that_compares_samples_gives_a_note_and_no_finding() -> None:
    def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    notes = [{"step": 1, **check(contrastive, LOGITS, CLASSES)}]
    assert additivity_finding(notes) is None
    assert "compares samples" in additivity_notes(notes)[0]
    assert additivity_notes([{"step": 1, **check(*RIGHT["samples"])}]) == ()
