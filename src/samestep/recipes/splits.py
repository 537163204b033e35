"""What a dataset gives to a recipe."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    train: SizedDataset
    evaluation: SizedDataset
    classes: tuple[str, ...]
    reads_files: bool = False
    collate: Collate = default_collate
    train_collate: Collate | None = None
