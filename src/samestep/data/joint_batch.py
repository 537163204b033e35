"""Global batches of several loaders as one, for steps with labelled and unlabelled data, or with two domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.errors import InputError

Batches = GlobalBatch | tuple[GlobalBatch, ...] | list[GlobalBatch] | Mapping[str, GlobalBatch]


@dataclass(frozen=True)
class JointBatch(GlobalBatch):
    """Global batches of several loaders; microbatch v has the data of microbatch v of each.

    Position, samples and sizes are those of the first.

    Attributes:
        parts: the batches.
    """

    parts: tuple[GlobalBatch, ...] = ()

    @property
    def identity(self) -> str:
        """Text with positions and samples, equal on every rank."""
        return " and ".join(part.identity for part in self.parts)


class _Sources:
    """The loaders of a joint batch; the positions of all move with a step."""

    def end_step(self, batch: GlobalBatch, *, stop: bool) -> None:
        assert isinstance(batch, JointBatch)
        for part in batch.parts:
            if part.source is not None:
                part.source.end_step(part, stop=stop)


def joint_batch(batches: Batches, *, has_forward: bool) -> GlobalBatch:
    """Return one global batch from a tuple, list or mapping of several; a global batch is returned as it is.

    The data of a microbatch are a tuple, or a mapping with the same keys.

    Args:
        batches: one batch or several.
        has_forward: a forward function receives the data, which are no pair of inputs and targets.

    Raises:
        InputError: something else than batches of loaders, sizes of microbatches that are not proportional, or no
            forward function.
    """
    if isinstance(batches, GlobalBatch):
        return batches
    values = list(batches.values()) if isinstance(batches, Mapping) else batches
    if not isinstance(values, tuple | list) or not values or not all(isinstance(b, GlobalBatch) for b in values):
        raise InputError(
            f"the batch is a {type(batches).__name__}",
            expected="a batch of samestep.loader, or a tuple or mapping of batches of several",
            fix="iterate over samestep.loader(dataset, ...) in place of a DataLoader",
            code="E_BATCH",
        )
    if not has_forward:
        raise InputError(
            f"a step of {len(values)} batches without a forward function",
            expected="a forward function, which receives the data of all batches",
            fix="engine.step((batch, other), forward=forward), with forward(model, data) for a tuple of data",
            code="E_BATCH",
        )
    first, parts = values[0], tuple(values)
    _require_proportional(parts)
    combine: Callable[[list[Any]], Any] = tuple
    if isinstance(batches, Mapping):
        keys = list(batches)
        combine = lambda data: dict(zip(keys, data, strict=True))  # noqa: E731
    return JointBatch(
        begin=first.begin,
        end=first.end,
        indices=first.indices,
        microbatches=first.microbatches,
        local_microbatches=_combined([part.local_microbatches for part in parts], combine),
        fillers=_combined([part.fillers for part in parts], combine),
        dataset=" and ".join(part.dataset for part in parts),
        source=_Sources(),
        parts=parts,
    )


def _combined(rows: list[tuple[Microbatch, ...]], combine: Callable[[list[Any]], Any]) -> tuple[Microbatch, ...]:
    return tuple(
        own[0]._replace(
            data=combine([microbatch.data for microbatch in own]),
            skipped=tuple(line for microbatch in own for line in microbatch.skipped),
            left_out=tuple(index for microbatch in own for index in microbatch.left_out),
        )
        for own in zip(*rows, strict=True)
    )


def _require_proportional(parts: tuple[GlobalBatch, ...]) -> None:
    """Require that a mean over each microbatch is a mean over each global batch."""
    first = parts[0]
    for part in parts[1:]:
        sizes = [[stop - start for start, stop in batch.bounds] for batch in (first, part)]
        if first.microbatches != part.microbatches or any(
            one * part.size != other * first.size for one, other in zip(*sizes, strict=True)
        ):
            raise InputError(
                f"the batches of a step have microbatches of {_listed(sizes[0])} and of {_listed(sizes[1])} samples",
                expected="equal numbers of microbatches, with sizes in one proportion",
                fix="the same microbatches in each samestep.loader, batch sizes that are multiples of it, and "
                "drop_last=True",
                code="E_BATCH",
            )


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
