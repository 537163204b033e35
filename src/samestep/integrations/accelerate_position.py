"""Position of a training with Accelerate, in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samestep.errors import CheckpointError

if TYPE_CHECKING:
    from samestep.integrations.accelerate import Accelerator


class Position:
    """Steps and positions in the data, as an object that Accelerate saves.

    Args:
        accelerator: the accelerator with the loaders.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._steps = accelerator, 0

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        loop = self._accelerator._loop
        return self._steps if loop is None else loop.engine.steps

    def reset(self) -> None:
        """Begin without steps."""
        self._steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the position of each loader with steps."""
        return {"steps": self.steps, "loaders": [loader.state() for loader in self._accelerator._loaders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set steps and positions.

        Raises:
            CheckpointError: the data or their batches are others than those of the checkpoint.
        """
        loaders, saved = self._accelerator._loaders, state["loaders"]
        if len(loaders) != len(saved):
            raise CheckpointError(
                f"the number of prepared loaders was {len(saved)} and is {len(loaders)}",
                expected="the loaders of the run that wrote the checkpoint, prepared in the same order",
                fix="prepare all of them before load_state, and no others",
                code="E_RESUME_CHANGED",
            )
        self._steps = state["steps"]
        if self._accelerator._loop is not None:
            self._accelerator._loop.engine.steps = self._steps
        for loader, position in zip(loaders, saved, strict=True):
            if position is None:
                loader.reset()  # saved before the first step
            else:
                loader.restore(position)
