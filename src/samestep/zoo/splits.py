"""Training and validation samples of a dataset, and the prediction task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import default_collate

from samestep.data.batch import Collate, SizedDataset
from samestep.report_text import printable
from samestep.zoo.data_files import fingerprint_of

Answer = dict[str, Any]
_MAX_LISTED_CLASSES = 10  # in a description of the data


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Dataset with a fixed split. Samples are pairs `(input, target)`.

    Attributes:
        train: training samples. Augmentation may use the generators of Python, NumPy and torch.
        evaluation: validation samples.
        classes: class names; class number `i` is `classes[i]`.
        reads_files: samples are read and decoded on access, so data workers save time.
        collate: function from a list of samples to batched inputs and targets.
        train_collate: collate function for training, such as mixup. May use the same generators as
            augmentation; their state is a function of the first sample of the batch.
        train_lengths: length of each training sample, to group samples of similar length in a
            global batch.
        evaluation_lengths: length of each validation sample; evaluation then runs from short to
            long.
        model_options: model options that follow from the data, such as the vocabulary size. Options
            of the recipe take precedence; options that the model does not have are ignored.
        fingerprint: hash of the names or contents of the training samples, which a resumption
            compares; empty for data that cannot change.
        evaluation_text: function from the index of a validation sample to its text, for reports.
    """

    train: SizedDataset
    evaluation: SizedDataset
    classes: tuple[str, ...]
    reads_files: bool = False
    collate: Collate = default_collate
    train_collate: Collate | None = None
    train_lengths: Sequence[int] | None = None
    evaluation_lengths: Sequence[int] | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    evaluation_text: Callable[[int], str] | None = None

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the training data that a resumption compares, as short text."""
        names = [str(name) for name in self.classes]
        listed = ", ".join(names[:_MAX_LISTED_CLASSES])
        if len(names) > _MAX_LISTED_CLASSES:
            listed += ", ..."
        classes = f"{listed} ({len(names)} in all, hash {fingerprint_of(names)[:8]})"
        facts = {"classes": printable(classes)}
        if self.fingerprint:
            facts["fingerprint"] = self.fingerprint
        return facts


@dataclass(frozen=True, kw_only=True)
class Task:
    """Conversion of files to model inputs, and of model outputs to answers.

    Each dataset of `samestep.recipes.builder.TASKS` has a function that returns its task from the
    class names and the options of the data.

    Attributes:
        reads: description of the input, such as `an image file`.
        read: function from a file to one input as in evaluation, without batch dimension and
            target.
        describe: function from the outputs for one input to plain data for JSON.
        picture: function from the file and its outputs to an image.
        complete: function from a model, a prompt and a number of tokens to a continuation (language
            models).
    """

    reads: str
    read: Callable[[Path], Any]
    describe: Callable[[Any], Answer]
    picture: Callable[[Path, Any], Image.Image] | None = None
    complete: Callable[[torch.nn.Module, str, int], str] | None = None


def top_classes(logits: torch.Tensor, classes: Sequence[str], count: int) -> Answer:
    """Return the `count` most probable classes of one sample, with their probabilities."""
    pairs = most_probable(logits, min(count, len(classes)))
    top = [{"class": classes[number], "probability": value} for number, value in pairs]
    return {"classes": top}


def most_probable(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` most probable class numbers of one sample, and their probabilities."""
    probabilities = logits.detach().double().reshape(-1).softmax(dim=0)
    top = probabilities.topk(min(count, len(probabilities)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
