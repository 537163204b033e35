"""Callbacks by the hooks that they have."""

from typing import Any

from samestep.data.batch import Microbatch
from samestep.engine.callbacks import Callback, TrainingValues, of_microbatches
from samestep.engine.loss import Loss


class Steps(Callback):
    """Has no hook of microbatches."""

    def begin_step(self, *_: Any) -> None:
        return


class Outputs(Steps):
    """Has one hook of microbatches."""

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        return


def test_callbacks_without_hooks_of_microbatches_let_them_be_computed_together() -> None:
    outputs, values = Outputs(), TrainingValues([])
    assert of_microbatches([Callback(), Steps(), outputs, values]) == [outputs, values]
