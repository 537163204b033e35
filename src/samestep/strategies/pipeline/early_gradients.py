"""Gradients of large parameters, added to the sums of a rank during backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from samestep.distributed.devices import is_accelerator
from samestep.strategies.reduction import ExactReduction, MicrobatchTree, Reduction

_LARGE_BYTES = 2**18  # of a parameter; below, a call costs more than a read from memory


class EarlyGradients:
    """Gradients that are added as soon as the backward has computed them, while they are in the processor's cache.

    From the second step on, and unless a parameter receives its gradient in several parts, as from reentrant activation
    checkpointing of a shared layer: the first part is not the gradient.

    Args:
        parameters: of which the large ones are added early.
        build: returns the reduction of some parameters.

    Attributes:
        reductions: of the large parameters.
        taken: parameters whose gradients of the present backward are added.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], build: Callable[[list[nn.Parameter]], Reduction]) -> None:
        large = [p for p in parameters if p.nbytes >= _LARGE_BYTES and not isinstance(p, DTensor)]
        self.reductions = {parameter: build([parameter]) for parameter in large}
        for parameter, reduction in self.reductions.items():
            if isinstance(reduction, ExactReduction):
                reduction.keeps_memory = not is_accelerator(parameter.device)
        self.taken: set[nn.Parameter] = set()
        self._seen: set[nn.Parameter] = set()
        self._is_first, self._has_parts = True, False
        self._current: tuple[MicrobatchTree, int] | None = None
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in large]

    def begin(self, tree: MicrobatchTree, microbatch: int) -> None:
        """Begin the backward of a microbatch in one stage."""
        self._current, self.taken, self._seen = (tree, microbatch), set(), set()

    def end(self) -> None:
        """End the backward; `taken` remains until the next one."""
        self._current = None

    def end_step(self) -> None:
        """End a step."""
        self._is_first = False

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, parameter: nn.Parameter) -> None:
        if self._current is None:
            return
        if parameter in self.taken:
            raise RuntimeError("a parameter received its gradient in several parts, but not in the first step")
        self._has_parts |= parameter in self._seen
        self._seen.add(parameter)
        gradient = parameter.grad
        if not self._is_first and not self._has_parts and gradient is not None and not gradient.is_sparse:
            self.reductions[parameter].accumulate(*self._current)
            self.taken.add(parameter)
