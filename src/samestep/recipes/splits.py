"""What a dataset gives to a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import default_collate

from samestep.data.samples import Collate, SizedDataset


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A dataset, split once and for all; samples are pairs `(input, target)`.

    Attributes:
        train: samples to train on; augmentation may use any of Python's, NumPy's and torch's generators.
        evaluation: samples to evaluate on.
        classes: names of the classes; class number `i` is `classes[i]`.
        reads_files: samples are read and decoded when they are asked for, so loader processes pay off.
        collate: from a list of samples to a pair of batched inputs and targets.
        train_collate: another such function for training, such as one that mixes samples; it may draw from any of the
            generators, whose state is a function of the shard's first sample.
        train_lengths: one a training sample, where samples of like length are to share a global batch.
        evaluation_lengths: the same for evaluation, which then goes from short to long.
        model_options: what a model may want to know of the data; a model that has an option of that name is given it,
            unless the recipe gives it.
        count_tokens: from a collated shard to how many tokens it has, and how many places with those that only fill up.
        notes: what a person should be told of the data, a line each.
        foreground_of: of the mask of a training sample, how many pixels are background and how many foreground; for
            losses that weigh them against each other.
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
    count_tokens: Callable[[Any], tuple[int, int]] | None = None
    notes: tuple[str, ...] = ()
    foreground_of: Callable[[int], tuple[int, int]] | None = None
