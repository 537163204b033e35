"""Hub of a module's parameters: sums the gradients of all calls over ranks once per backward.

    parameter -> Wait -> Launch -> alias, used by the calls

One pair of nodes for each bucket. Launch runs when the gradients of its bucket are complete and starts their sum; Wait
runs after everything else of the backward and returns the sum. So sums overlap with the backward, and autograd adds
the gradients of several calls, and those of uses outside of calls, by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from samestep.errors import RunError
from samestep.reduce.buckets import Bucket, plan_buckets
from samestep.view.crossings import leave
from samestep.view.ranks import Ranks
from samestep.view.slots import ParameterSlots, replaced

_FIRST = 2**63  # sequence number of a node that runs as soon as its inputs are complete
_LAST = 0  # of one that runs when no other node can


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: _HubBucket, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        # Not `view_as`: a forward may change parameters in place, which autograd forbids for views of a node.
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.bucket.finish(gradients))


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bucket: _HubBucket, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        # The anchor has a gradient in every backward of a call, also if no own row uses a parameter of the bucket.
        anchor = torch.zeros((), device=bucket.device)
        return (*[parameter.detach() for parameter in parameters], anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.bucket.launch(gradients[:-1]))


class _HubBucket:
    """One bucket of a hub, and its gradients in the current backward."""

    def __init__(self, hub: Hub, number: int, parameters: list[torch.Tensor]) -> None:
        self.number = number
        self.parameters = parameters
        self.bucket = Bucket(parameters)
        self.device = parameters[0].device
        self.flat: torch.Tensor | None = None
        self.work: Any = None
        self.pending: torch.Tensor | None = None  # own gradients of `no_sync`
        self._versions: list[int] = []  # of the gradients of the parameters, when they were last looked at
        self._hub = hub
        # The autograd function of a hub lives as long as the hub: `Wait` and `Launch` save no tensors.
        waiting = _Wait.apply(self, *parameters)  # type: ignore[no-untyped-call]
        waiting[0].grad_fn._set_sequence_nr(_LAST)  # private, exists in torch 2.11 and 2.13
        *self.aliases, self.anchor = _Launch.apply(self, *waiting)  # type: ignore[no-untyped-call]
        self.anchor.grad_fn._set_sequence_nr(_FIRST)

    def launch(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Start the sum of own gradients. The returned tensors only carry the order of nodes."""
        if torch.is_grad_enabled():  # create_graph: crossings that can be differentiated
            return [None if g is None else leave(g, self._hub.ranks) for g in gradients]
        self._hub.begin_backward()
        gradients = [None if g is None else _dense(g) for g in gradients]
        if self.pending is None:
            self.flat = self.bucket.fill(gradients)
        else:  # added in place: a new flat tensor would move all gradients once more
            self.flat = self._pending_gradients()
            self.bucket.add(self.flat, gradients)
        if not self._hub.is_deferred:
            self.pending = None
            self._hub.start_in_order()
        # Views of the same memory, so that this takes no time; `finish` replaces them.
        return list(self.bucket.views(self.flat))

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Wait for the sum and return the gradients of the parameters."""
        if torch.is_grad_enabled():
            return gradients
        flat = self.flat
        if flat is None:  # autograd does not need the gradients of this bucket
            return gradients
        self.flat = None
        if self._hub.is_deferred:
            return self._defer(flat)
        if self.work is None:
            self._hub.start_all()
        self._hub.ranks.wait(self.work)
        self.work = None
        return self.bucket.gradients(flat)

    def _defer(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        if self.pending is None:
            self.pending = flat
            self._versions = [0] * len(self.parameters)
        # `.grad` exists from the first backward on, so that `zero_grad` can be seen.
        marks: list[torch.Tensor | None] = []
        for parameter in self.parameters:
            mark = None
            if parameter.grad is None:
                mark = torch.zeros_like(parameter)
            marks.append(mark)
        return marks

    def _pending_gradients(self) -> torch.Tensor:
        """Return own gradients of earlier backwards; those which `zero_grad` has dropped since are zero."""
        assert self.pending is not None
        for index, view in enumerate(self.bucket.views(self.pending)):
            gradient = self.parameters[index].grad
            if gradient is None:
                self._versions[index] = 0
                view.zero_()
            elif gradient._version != self._versions[index]:
                self._versions[index] = gradient._version
                if not gradient.any():
                    view.zero_()
        return self.pending


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


class Hub:
    """Aliases of a module's parameters, whose gradients are summed over ranks.

    Args:
        module: the module.
        parameters: its parameters that require gradients.
        ranks: the ranks.
        before_reduction: called once in each backward before the first sum.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        ranks: Ranks,
        before_reduction: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self.is_deferred = False  # inside of `no_sync`
        self._before_reduction = before_reduction
        self._backward = -1  # task of autograd in which buckets are launched
        self._next = 0
        self._pointers = [(parameter, parameter.data_ptr(), parameter.dtype) for parameter in parameters]
        plan = plan_buckets(parameters)
        self.buckets = [
            _HubBucket(self, number, [parameters[index] for index in members]) for number, members in enumerate(plan)
        ]
        self._slots = ParameterSlots(module)
        self._entries = self._slots.entries(self._mapping(self.aliases()))

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        parameters = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        return dict(zip(parameters, replacements, strict=True))

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters of the hub, in the same places with the same memory."""
        if len(parameters) != len(self._pointers):
            return False
        if any(container[key] is not value for container, key, value, _ in self._entries):
            return False
        return all(
            parameter is own and parameter.data_ptr() == pointer and parameter.dtype == dtype
            for parameter, (own, pointer, dtype) in zip(parameters, self._pointers, strict=True)
        )

    @property
    def anchors(self) -> list[torch.Tensor]:
        """One scalar for each bucket; a call gives each a gradient."""
        return [bucket.anchor for bucket in self.buckets]

    def aliases(self) -> list[torch.Tensor]:
        """Return the aliases of the parameters, in the order of buckets."""
        return [alias for bucket in self.buckets for alias in bucket.aliases]

    def aliases_in_place(self) -> AbstractContextManager[None]:
        """Put the aliases into the module during a block."""
        return replaced(self._entries)

    def in_place(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Put other tensors, in the order of `aliases`, into the module during a block."""
        return replaced(self._slots.entries(self._mapping(tensors)))

    def begin_backward(self) -> None:
        """Notice a new backward."""
        task = torch._C._current_graph_task_id()
        if task == self._backward:
            return
        self._backward = task
        self._next = 0
        for bucket in self.buckets:
            bucket.flat = None
            bucket.work = None
        if not self.is_deferred:
            self._before_reduction()

    def start_in_order(self) -> None:
        """Start the sums of complete buckets, in the order of buckets on all ranks."""
        # Started when ready, in whatever order, sums of different buckets could be paired.
        while self._next < len(self.buckets) and self.buckets[self._next].flat is not None:
            self._start(self.buckets[self._next])
            self._next += 1

    def start_all(self) -> None:
        """Start the sums that wait for a bucket which this backward does not need."""
        for bucket in self.buckets[self._next :]:
            if bucket.flat is not None and bucket.work is None:
                self._start(bucket)
        self._next = len(self.buckets)

    def _start(self, bucket: _HubBucket) -> None:
        assert bucket.flat is not None
        bucket.work = self.ranks.start_sum(bucket.flat)

    def require_no_pending(self) -> None:
        """Require that all gradients of `no_sync` were summed.

        Raises:
            RunError: an optimizer steps before a backward outside of `no_sync`.
        """
        if any(bucket.pending is not None for bucket in self.buckets):
            raise RunError(
                "the optimizer steps with gradients of samestep.no_sync that were not summed over ranks",
                expected="a backward outside of samestep.no_sync before the step",
                fix="end the block before the last backward of the step",
                code="E_RUN",
            )
