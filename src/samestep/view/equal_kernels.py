"""Deterministic kernels while several ranks compute the same, so that all get the same bits.

Under `fast` the settings of torch are those of the script, and a divided call needs no other ones:
each rank computes its own rows. A call that is computed whole, as the first one of each kind, is
computed by every rank, with its backward. On a GPU, kernels that add by atomic operations, and
kernels selected by their time, have other bits on every
rank: replicas would drift apart.
"""

from __future__ import annotations

import warnings

from samestep.distributed.devices import KernelChoice
from samestep.view.region import current_region

_WARNING = ".* does not have a deterministic implementation"


class EqualKernels:
    """Settings of torch from the first whole call of a step to the step of the optimizer.

    Args:
        is_needed: whether other ranks compute the same on GPUs.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._before: KernelChoice | None = None
        self._own: KernelChoice | None = None

    def begin(self) -> None:
        """Request deterministic kernels; operations without one compute as before."""
        if not self._is_needed or self._own is not None or current_region() is not None:
            return
        self._before = KernelChoice.present()
        self._own = self._before._replace(measures=False)
        is_deterministic, _ = self._before.determinism
        if not is_deterministic:
            self._own = KernelChoice((True, True), fills=False, measures=False)
            warnings.filterwarnings("ignore", _WARNING, UserWarning)
        self._own.install()

    def end(self) -> None:
        """Put the settings back, except for those that the script has changed since."""
        if self._before is None or self._own is None:
            return
        settings = zip(KernelChoice.present(), self._own, self._before, strict=True)
        restored = (before if present == own else present for present, own, before in settings)
        KernelChoice._make(restored).install()
        self._own = None
