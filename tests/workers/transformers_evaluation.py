"""Evaluations of the trainer of Transformers, on the ranks of `helpers.forked_ranks`."""

from typing import Any

import torch
from torch import nn

from helpers.forked_ranks import refusal
from workers.transformers_training import VOCABULARY, padded, rows, trainer

WIDTH = 3  # of the predictions after `preprocess_logits_for_metrics`


class Outputs(nn.Module):
    """Model with a second loss, which is one value per microbatch, and outputs of two widths."""

    has_table = False  # an output without rows of samples

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        tokens = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(tokens.flatten(0, 1), labels.flatten())
        outputs = {"loss": loss, "tokens": tokens, "second": tokens.square().mean()}
        return outputs | ({"table": self.head.weight} if self.has_table else {})


def _instance(folder: str, **options: Any) -> Any:
    instance = trainer(folder, net=Outputs(), max_steps=1, **options)
    instance.compute_metrics = None
    return instance


def predict(folder: str) -> dict[str, Any]:
    """Return shapes and sums of predictions, with and without preprocessing, and losses."""
    instance, sizes = _instance(folder), []

    def preprocess(logits: Any, labels: Any) -> Any:
        sizes.append(len(labels))
        return logits[0][..., :WIDTH], logits[1]

    plain = instance.predict(rows(57))
    instance.preprocess_logits_for_metrics = preprocess
    reduced = instance.predict(rows(57))
    assert instance.preprocess_logits_for_metrics is preprocess
    return {
        "shapes": [list(values.shape) for values in (*plain.predictions, plain.label_ids, *reduced.predictions)],
        "values": [values.astype(float).sum().item() for values in (*plain.predictions, *reduced.predictions)],
        "seconds": plain.predictions[1].tolist(),
        "loss": [plain.metrics["test_loss"], reduced.metrics["test_loss"]],
        "largest": max(sizes),
    }


def outputs_without_rows(folder: str) -> dict[str, Any]:
    """Return code and text of an output without one row per sample, and the code without the output."""
    instance = _instance(folder)
    instance.model.has_table = True
    _, text = refusal(instance.predict, rows(57))
    return {"text": text, "ignored": refusal(instance.predict, rows(57), ignore_keys=["table"])[0]}


def other_weights(folder: str) -> list[str]:
    """Return the codes of evaluations before a step, with the weights of the ranks equal, and different on one."""
    instance = _instance(folder)
    codes = [refusal(instance.evaluate)[0]]
    if instance._world.rank == 1:
        nn.init.zeros_(instance.model.head.bias)
    return [*codes, refusal(instance.evaluate)[0], refusal(instance.predict, rows(8))[0]]


def counted_labels(folder: str) -> list[float]:
    """Return the losses of an evaluation whose microbatches have different numbers of labels, some none."""
    instance = _instance(folder)

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = padded(samples)
        batch["labels"][torch.tensor([len(sample["input_ids"]) < 20 for sample in samples])] = -100
        return batch

    instance.data_collator = collate
    return [instance.evaluate()["eval_loss"]]
