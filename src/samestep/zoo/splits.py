"""Training and validation samples of a dataset, class numbers of labels, and the prediction task."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import default_collate

from samestep.data.samples import Collate, SizedDataset
from samestep.data.streams.source import fingerprint_of
from samestep.errors import DataError, printable
from samestep.zoo.options import require_option
from samestep.zoo.sample_cache import SampleCache

Answer = dict[str, Any]
_MAX_LISTED = 20  # labels in an error
_MAX_LISTED_CLASSES = 10  # in a description of the data
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)")
_MAX_DIGITS = 9  # of a class number


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
            augmentation; their state is a function of the first sample of the microbatch.
        prepare: function from a collated microbatch on its device to the data of the driver, such
            as the normalization of bytes; without random numbers.
        train_lengths: length of each training sample, to group samples of similar length in a
            global batch.
        evaluation_lengths: length of each validation sample; evaluation then runs from short to
            long.
        model_options: model options that follow from the data, such as the vocabulary size. Options
            of the recipe take precedence; options that the model does not have are ignored.
        count_tokens: function from a collated microbatch to the number of tokens without and with
            padding.
        count_foreground: function from the index of a training sample to the numbers of background
            and foreground pixels of its mask, for losses that weight foreground.
        open_cache: function of `samestep.zoo.images.source` with source and files already set, or
            None for data without a cache.
        fingerprint: hash of the names or contents of the training samples, which a resumption
            compares; empty for data that cannot change.
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
    count_foreground: Callable[[int], tuple[int, int]] | None = None
    open_cache: Callable[[Any], SampleCache] | None = None
    fingerprint: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the training data that a resumption compares, as short text."""
        names = [str(name) for name in self.classes]
        listed = ", ".join(names[:_MAX_LISTED_CLASSES]) + (
            ", ..." if len(names) > _MAX_LISTED_CLASSES else ""
        )
        classes = f"{listed} ({len(names)} in all, hash {fingerprint_of(names, [])[:8]})"
        return {
            "classes": printable(classes),
            **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Task:
    """Conversion of files to model inputs and of model outputs to answers, without the training data.

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
    return {
        "classes": [{"class": classes[number], "probability": value} for number, value in pairs]
    }


def most_probable(logits: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` most probable class numbers of one sample, and their probabilities."""
    probabilities = logits.detach().double().reshape(-1).softmax(dim=0)
    top = probabilities.topk(min(count, len(probabilities)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def train_validation_split(
    keys: Sequence[str],
    fraction: float,
    *,
    unit: str = "sample",
    labels: Sequence[int | None] | None = None,
    classes: Sequence[str] = (),
) -> tuple[list[int], list[int]]:
    """Return the ascending indices of training and validation samples.

    Samples with a hash of the key below `fraction` are validation samples, so later samples do not
    move others. Samples with equal keys stay on the same side. Both sides receive at least one key
    of every class.

    Args:
        keys: key of each sample, such as its file name.
        fraction: fraction of validation samples, between 0 and 1.
        unit: noun for one key, for errors.
        labels: class number of each sample, for a split within each class. Samples of class None
            are split by their keys alone.
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
                    code="E_CLASSES",
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
    require_option("evaluation_fraction", fraction, 0 < fraction < 1, "between 0 and 1", 0.2)


def hash_fraction(key: str) -> float:
    """Return a number in [0, 1) that is a function of `key` alone, which can be a file name that is not UTF-8."""
    return int.from_bytes(hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:6]) / 2**48


def label_text(value: object) -> str:
    """Return a label as text without surrounding white space, empty if missing; 1 and 1.0 are equal labels."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    if is_missing:
        return ""
    return str(value).strip()


def class_names(classes: object) -> tuple[str, ...]:
    """Return class names of `data.options.classes`, or of the data.

    Raises:
        DataError: they are not at least two different names; YAML reads `yes` and `no` as booleans.
    """
    values = classes if isinstance(classes, list | tuple | range) else ()
    names = tuple(map(str, values))
    is_valid = len(names) >= 2 and len({label_text(name) for name in names}) == len(names)
    if not is_valid or any(isinstance(value, bool) for value in values):
        raise DataError(
            f"the classes are {classes!r}",
            expected="at least two different names; in YAML, yes and no are booleans without quotation marks",
            fix="correct the labels, or set data.options.classes, such as ['no', 'yes']",
            code="E_CLASSES",
        )
    return names


class ClassLabels:
    """Class numbers of labels: integers are class numbers, texts are class names.

    A text can also be a class number, unless some names are other numbers: with names 1 to 3, a
    label 2 is ambiguous.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._numbers = {label_text(name): number for number, name in enumerate(classes)}
        are_numbers = all(name == str(number) for name, number in self._numbers.items())
        self._reads_numbers = are_numbers or not any(
            _NUMBER.fullmatch(name) for name in self._numbers
        )

    def number(self, label: str | int, place: str) -> int:
        """Return the class number of a label at `place`.

        Raises:
            DataError: the label is not a class.
        """
        number = label
        if isinstance(label, str):
            name = label.strip()
            is_number = self._reads_numbers and name.isdecimal() and len(name) <= _MAX_DIGITS
            number = self._numbers.get(name, int(name) if is_number else -1)
        if not isinstance(number, int) or not 0 <= number < len(self._numbers):
            raise DataError(
                f"{place}: the label {label!r} is not a class",
                expected=f"a class, such as {', '.join(list(self._numbers)[:_MAX_LISTED])}, or its number from 0",
                fix="correct the label or data.options.classes, or skip such samples: data.bad_samples: skip",
                code="E_CLASSES",
            )
        return number
