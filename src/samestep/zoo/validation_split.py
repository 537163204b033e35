"""Split of samples into training and validation by a hash of their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from samestep.errors import DataError
from samestep.zoo.options import require_option


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
                    fix=f"add a {unit}, or set data.options.evaluation_path",
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
    """Return a number in [0, 1) that is a function of `key` alone."""
    # Not `hash`, which has another seed in each process.
    content = key.encode(errors="surrogatepass")  # a file name can have bytes that are not UTF-8
    # 48 bits: a float has them all.
    return int.from_bytes(hashlib.sha256(content).digest()[:6]) / 2**48
