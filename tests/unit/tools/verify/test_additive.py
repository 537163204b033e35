"""A loss is the sum of its pieces, or it is found out."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep import Loss, LossPart, MultiLoss, cross_entropy
from samestep.data.batch import Shard
from samestep.tools.verify.additive import additivity
from samestep.tools.verify.cuts import cut_finding, cut_notes

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (6,), generator=GENERATOR)
TOKENS = torch.randint(0, 4, (6, 5), generator=GENERATOR).masked_fill(torch.arange(5) > torch.arange(6)[:, None], -100)
TOKEN_LOGITS = torch.randn(6, 4, 5, generator=GENERATOR)
WEIGHTS = torch.tensor([0.1, 1.0, 2.0, 5.0])


def checked(loss: Any, outputs: Any, targets: Any, size: int = 6) -> dict[str, Any]:
    return additivity(loss, outputs, Shard(2, size, (None, targets)))


def by_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=-100)


RIGHT = {
    "samples": (nn.CrossEntropyLoss(), LOGITS, CLASSES),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, CLASSES),
    "sum and count": (cross_entropy, LOGITS, CLASSES),
    "tokens counted": (cross_entropy, TOKEN_LOGITS, TOKENS),
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
    "weighted mean": (nn.CrossEntropyLoss(weight=WEIGHTS), LOGITS, CLASSES),
    "a penalty a shard": (lambda o, t: Loss(cross_entropy(o, t).sum + 1.0, len(t)), LOGITS, CLASSES),
    "a count of shards": (lambda o, t: Loss(cross_entropy(o, t).sum, 1), LOGITS, CLASSES),
    "the largest": (lambda o, t: functional.cross_entropy(o, t, reduction="none").max(), LOGITS, CLASSES),
}


@pytest.mark.parametrize("name", RIGHT)
def test_sums_add_up(name: str) -> None:
    found = checked(*RIGHT[name])
    assert (found["checked"], found["cuts"]) == (True, [])


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_found(name: str) -> None:
    found = checked(*WRONG[name])
    assert found["checked"]
    assert found["shard"] == 2
    first = found["cuts"][0]
    assert (first["sum"], first["count"]) != (first["sum_of_pieces"], first["count_of_pieces"])


def test_what_cannot_be_cut_is_not_checked() -> None:
    assert not checked(cross_entropy, LOGITS, CLASSES, size=1)["checked"]
    assert not checked(lambda o, t: o.mean(), torch.tensor(1.0), CLASSES)["checked"]
    assert not checked(cross_entropy, LOGITS, [1, 2, 3, 4, 5, 6])["checked"]


def test_parts_of_a_loss_are_looked_at_one_by_one() -> None:
    tokens = LossPart("tokens", lambda o, t: cross_entropy(o, t).sum, count=lambda targets: (targets != -100).sum())
    penalty = LossPart("penalty", lambda o, t: torch.tensor(3.0), count="once")
    assert checked(MultiLoss([tokens, penalty]), TOKEN_LOGITS, TOKENS)["cuts"] == []
    wrong = LossPart("tokens", lambda o, t: by_token(o, t) * len(t))
    assert checked(MultiLoss([wrong, penalty]), TOKEN_LOGITS, TOKENS)["cuts"]


def finding(loss: Any, outputs: Any, targets: Any) -> str | None:
    """What is said of a loss, if it is called a mistake."""
    found = cut_finding([{"step": 1, **checked(loss, outputs, targets)}])
    return found.evidence[-1] if found else None


def test_kinds_of_mistakes_are_told_apart() -> None:
    assert finding(*RIGHT["samples"]) is None
    assert "a mean of means" in str(finding(*WRONG["mean over tokens"]))
    assert "a mean of means" in str(finding(*WRONG["weighted mean"]))
    assert "once a shard" in str(finding(*WRONG["a penalty a shard"]))


def test_a_loss_between_samples_is_a_note_and_no_mistake() -> None:
    def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    notes = [{"step": 1, **checked(contrastive, LOGITS, CLASSES)}]
    assert cut_finding(notes) is None
    assert "compares samples" in cut_notes(notes)[0]
    assert cut_notes([{"step": 1, **checked(*RIGHT["samples"])}]) == ()
