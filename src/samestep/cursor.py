"""Position of a run in its data, and whether an epoch has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from samestep.errors import CheckpointError


@dataclass(frozen=True)
class Cursor:
    """The only position of a run, independent of ranks."""

    epoch: Annotated[int, Ge(0), Le(2**62)] = 0  # number of complete passes over the data
    samples: Annotated[int, Ge(0), Le(2**62)] = 0  # of the current pass, consumed by all ranks


def require_position(cursor: Cursor, samples: int, batch_size: int) -> None:
    """Require that an epoch of `samples` samples has a global batch at the cursor of a checkpoint.

    Raises:
        CheckpointError: the position does not exist.
    """
    if cursor.samples >= samples or cursor.samples % batch_size:
        raise CheckpointError(
            f"the checkpoint is at sample {cursor.samples} of an epoch",
            expected=f"the start of a global batch of {batch_size}, in an epoch of {samples} "
            "samples",
            fix="use the data and the batch size with which the run began",
            code="E_RESUME_CHANGED",
        )
