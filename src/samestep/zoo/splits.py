"""Training and validation samples of a dataset, and its prediction task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import default_collate

from samestep.data.microbatch_dataset import Collate, SizedDataset
from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError
from samestep.report_limits import printable
from samestep.zoo.cache.sample_cache import SampleCache

Answer = dict[str, Any]
_MAX_LISTED = 10  # classes in a description of the data


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Dataset with a fixed split. Samples are pairs `(input, target)`.

    Attributes:
        train: training samples. Augmentation may use the generators of Python, NumPy and torch.
        evaluation: validation samples.
        classes: class names; class number `i` is `classes[i]`.
        reads_files: samples are read and decoded on access, so data workers save time.
        collate: function from a list of samples to batched inputs and targets.
        train_collate: collate function for training, such as mixup. May use the same generators as augmentation; their
            state is a function of the first sample of the microbatch.
        prepare: function from a collated microbatch on its device to the data of the engine, such as the normalization
            of bytes; without random numbers.
        train_lengths: length of each training sample, to group samples of similar length in a global batch.
        evaluation_lengths: length of each validation sample; evaluation then runs from short to long.
        model_options: model options that follow from the data, such as the vocabulary size. Options of the recipe take
            precedence; options that the model does not have are ignored.
        count_tokens: function from a collated microbatch to the number of tokens without and with padding.
        notes: messages for the user, one line each.
        count_foreground: function from the index of a training sample to the numbers of background and foreground
            pixels of its mask, for losses that weight foreground.
        open_cache: function of `samestep.zoo.images.source` with source and files already given, or None for data
            without a cache.
        fingerprint: hash of the names or contents of the training samples, which a resumption compares; empty for data
            that cannot change.
    """

    train: SizedDataset
    evaluation: SizedDataset
    classes: tuple[str, ...]
    reads_files: bool = False
    collate: Collate = default_collate
    train_collate: Collate | None = None
    prepare: Callable[[Any], Any] | None = None
    train_lengths: Sequence[int] | None = None
    evaluation_lengths: Sequence[int] | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    count_tokens: Callable[[Any], tuple[int, int]] | None = None
    notes: tuple[str, ...] = ()
    count_foreground: Callable[[int], tuple[int, int]] | None = None
    open_cache: Callable[..., tuple[SampleCache, str]] | None = None
    fingerprint: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the training data that a resumption compares, as short text."""
        names = [str(name) for name in self.classes]
        listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
        classes = f"{listed} ({len(names)} in all, hash {fingerprint_of(names, [])[:8]})"
        return {"classes": printable(classes), **({"fingerprint": self.fingerprint} if self.fingerprint else {})}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Conversion of files to model inputs and of model outputs to answers, without the training data.

    Each dataset of `samestep.recipes.builder.TASKS` has a function that returns its task from the class names and the
    options of the data.

    Attributes:
        reads: description of the input, such as `an image file`.
        read: function from a file to one input as in evaluation, without batch dimension and target.
        describe: function from the outputs for one input to plain data for JSON.
        picture: function from the file and its outputs to an image.
        complete: function from a model, a prompt and a number of tokens to a continuation (language models).
    """

    reads: str
    read: Callable[[Path], Any]
    describe: Callable[[Any], Answer]
    picture: Callable[[Path, Any], Image.Image] | None = None
    complete: Callable[[torch.nn.Module, str, int], str] | None = None


def top_classes(logits: torch.Tensor, classes: Sequence[str], count: int) -> Answer:
    """Return the `count` most probable classes of one sample, with their probabilities."""
    probabilities = logits.detach().double().reshape(-1).softmax(dim=0)
    top = probabilities.topk(min(count, len(classes)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return {"classes": [{"class": classes[number], "probability": value} for number, value in pairs]}


def train_validation_split(
    keys: Sequence[str],
    fraction: float,
    *,
    unit: str = "sample",
    labels: Sequence[int | None] | None = None,
    classes: Sequence[str] = (),
) -> tuple[list[int], list[int]]:
    """Return the ascending indices of training and validation samples.

    Samples whose key has a hash below `fraction` are validation samples, so adding samples later does not move others.
    Samples with equal keys stay on the same side. Both sides receive at least one key of every class.

    Args:
        keys: key of each sample, such as its file name.
        fraction: fraction of validation samples, between 0 and 1.
        unit: noun for one key, for errors.
        labels: class number of each sample, for a split within each class. Samples of class None are split by their
            keys alone.
        classes: class names, for errors.

    Raises:
        DataError: the fraction is not between 0 and 1, or a class has only one key.
    """
    require_fraction(fraction)
    groups: dict[int | None, dict[str, list[int]]] = {}
    for index, (key, label) in enumerate(zip(keys, labels or [0] * len(keys), strict=True)):
        groups.setdefault(label, {}).setdefault(key, []).append(index)
    train: list[int] = []
    validation: list[int] = []
    for label, members in groups.items():
        ordered = sorted(members, key=hash_fraction)
        count = sum(hash_fraction(key) < fraction for key in ordered)
        if label is not None:
            if len(ordered) < 2:
                owner = f"class {classes[label]!r} has" if classes else "there is"
                raise DataError(
                    f"{owner} only one {unit}: {ordered[0]}",
                    expected="at least one for training and one for validation",
                    fix=f"add a {unit}, or set data.options.evaluation_path (evaluation_split for hub_images)",
                    code="E_SPLIT",
                )
            count = min(len(ordered) - 1, max(1, count))
        validation += [index for key in ordered[:count] for index in members[key]]
        train += [index for key in ordered[count:] for index in members[key]]
    return sorted(train), sorted(validation)


def require_fraction(fraction: float) -> None:
    """Require that `data.options.evaluation_fraction` is between 0 and 1.

    Raises:
        DataError: `fraction` is 0 or less, or 1 or more.
    """
    if not 0 < fraction < 1:
        name = "data.options.evaluation_fraction"
        raise DataError(f"{name} is {fraction}", "0 < evaluation_fraction < 1", f"--set {name}=0.2", code="E_SPLIT")


def hash_fraction(key: str) -> float:
    """Return a number in [0, 1) that is a function of `key` alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48
