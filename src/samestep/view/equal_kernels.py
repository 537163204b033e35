"""Deterministic kernels while several ranks compute the same, so that all get the same bits.

Under `fast` the settings of torch are those of the script, and a divided call needs no other ones: each rank computes
its own rows. A call that is computed whole, as the first one of each kind, is computed by every rank, with its
backward. On a GPU, kernels that add by atomic operations, and kernels selected by their time, have other bits on every
rank: replicas would drift apart.
"""

from __future__ import annotations

import warnings

import torch

from samestep.view.region import current_region

_WARNING = ".* does not have a deterministic implementation"


class EqualKernels:
    """Settings of torch from the first whole call of a step to the step of the optimizer.

    Args:
        is_needed: whether other ranks compute the same on GPUs.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._is_active = False
        self._is_deterministic = False
        self._warns = False
        self._fills = False
        self._measures = False

    def begin(self) -> None:
        """Request deterministic kernels; operations without one compute as before."""
        if not self._is_needed or self._is_active or current_region() is not None:
            return
        self._is_active = True
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._warns = torch.is_deterministic_algorithms_warn_only_enabled()
        self._fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        self._measures = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = False
        if not self._is_deterministic:
            warnings.filterwarnings("ignore", _WARNING, UserWarning)
            torch.use_deterministic_algorithms(True, warn_only=True)
            # It costs a pass over each new tensor, and helps only programs that read memory before they write it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def end(self) -> None:
        """Put the settings back, except for those that the script has changed since."""
        if not self._is_active:
            return
        self._is_active = False
        if not torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = self._measures
        if not self._is_deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
            torch.use_deterministic_algorithms(False, warn_only=self._warns)
            torch.utils.deterministic.fill_uninitialized_memory = self._fills  # type: ignore[attr-defined]
