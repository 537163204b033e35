"""Samples kept apart to evaluate on, where nobody has divided the data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from samestep.errors import DataError

Places = list[int]


def kept_apart(
    names: Sequence[str], labels: Sequence[int | None], classes: Sequence[str], fraction: float
) -> tuple[Places, Places]:
    """Positions to train on and to evaluate on, ascending: those whose name hashes to less than `fraction` are apart.

    Only its name decides where a sample goes, so samples that are added later move no other; of each class there is at
    least one on each side. Samples without a label go by their names alone.

    Raises:
        DataError: a class has one sample, or the fraction cannot be.
    """
    if not 0 < fraction < 1:
        raise DataError(f"data.options.evaluation_fraction is {fraction}", rule="between 0 and 1", do="0.2 is usual")
    places = [_place(name) for name in names]
    members: dict[int | None, Places] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    train: Places = []
    evaluation: Places = []
    for label, positions in members.items():
        own = sorted(positions, key=places.__getitem__)
        apart = sum(places[position] < fraction for position in own)
        if label is not None:
            if len(own) < 2:
                raise DataError(
                    f"class {classes[label]!r} has one image",
                    rule="one to train on and one to evaluate on",
                    do="add images, or name others to evaluate on: data.options.evaluation_path, or evaluation_split",
                )
            apart = min(len(own) - 1, max(1, apart))
        evaluation += own[:apart]
        train += own[apart:]
    return sorted(train), sorted(evaluation)


def _place(name: str) -> float:
    """A number in 0..1 that only the name decides."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48
