"""Hub of a module's parameters: sums the gradients of all calls over ranks once per backward.

    parameter -> Wait -> Launch -> alias, used by the calls

One pair of nodes for each bucket. Launch runs when the gradients of its bucket are complete and starts their sum; Wait
runs after everything else of the backward and returns the sum. So sums overlap with the backward, and autograd adds
the gradients of several calls, and those of uses outside of calls, by its own rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.errors import RunError
from samestep.reduce.buckets import Bucket, plan_buckets
from samestep.view.crossings import leave
from samestep.view.ranks import Ranks
from samestep.view.slots import ParameterSlots, is_in_place, replaced

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
    """One bucket of a hub, and its gradients in the current backward.

    The graph of a call refers to it, so it must not refer to the graph: a cycle through nodes would never be freed.
    """

    def __init__(self, sums: _Sums, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.bucket = Bucket(parameters)
        self.device = parameters[0].device
        self.flat: torch.Tensor | None = None
        self.work: Any = None
        self.pending: torch.Tensor | None = None  # own gradients of `no_sync`
        self._has_gradient: list[bool] = []  # for each parameter: whether the current backward has one here
        self._hooks: list[Any] = []  # of the parameters, while gradients are pending
        self._versions: list[int] = []  # of the gradients of the parameters, when they were last looked at
        self._sums = sums

    def aliases(self) -> list[torch.Tensor]:
        """Return new aliases of the parameters, and the anchor."""
        waiting = _Wait.apply(self, *self.parameters)  # type: ignore[no-untyped-call]
        waiting[0].grad_fn._set_sequence_nr(_LAST)  # private, exists in torch 2.11 and 2.13
        aliases: tuple[torch.Tensor, ...] = _Launch.apply(self, *waiting)  # type: ignore[no-untyped-call]
        launch: Any = aliases[-1].grad_fn
        launch._set_sequence_nr(_FIRST)
        return list(aliases)

    def launch(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Start the sum of own gradients. The returned tensors only carry the order of nodes."""
        if torch.is_grad_enabled():  # create_graph: crossings that can be differentiated
            return [None if g is None else leave(g, self._sums.ranks) for g in gradients]
        self._sums.begin_backward()
        gradients = [None if g is None else _dense(g) for g in gradients]
        self._has_gradient = [gradient is not None for gradient in gradients]
        if self.pending is None:
            self.flat = self.bucket.fill(gradients)
        else:  # added in place: a new flat tensor would move all gradients once more
            self.flat = self._pending_gradients()
            self.bucket.add(self.flat, gradients)
        if not self._sums.is_deferred:
            self.pending = None
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._sums.start_in_order()
        # Views of the same memory, so that this takes no time; `finish` replaces them.
        return list(self.bucket.views(self.flat))

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Wait for the sum and return the gradients of the parameters."""
        if torch.is_grad_enabled():
            return gradients
        flat = self.flat
        if flat is None:  # autograd does not need the gradients of this bucket
            return gradients
        if self._sums.is_deferred:
            self.flat = None
            return self._defer(flat)
        if self.work is None:
            self._sums.start_all()
        self._sums.ranks.wait(self.work)
        self.flat = None
        self.work = None
        return self.bucket.gradients(flat)

    def _defer(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        if self.pending is None:
            self.pending = flat
            self._versions = [0 if one.grad is None else one.grad._version for one in self.parameters]
            self._watch_accumulation()
        # `.grad` exists from the first backward on, so that `zero_grad` can be seen.
        marks: list[torch.Tensor | None] = []
        for parameter, has_gradient in zip(self.parameters, self._has_gradient, strict=True):
            mark = None
            if has_gradient and parameter.grad is None:
                mark = torch.zeros_like(parameter)
            marks.append(mark)
        return marks

    def _watch_accumulation(self) -> None:
        """Note the versions of `.grad` after gradients are added to it, to tell these writes from `zero_grad`."""
        versions = self._versions

        def note(index: int, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                versions[index] = parameter.grad._version

        self._hooks = [
            one.register_post_accumulate_grad_hook(partial(note, index)) for index, one in enumerate(self.parameters)
        ]

    def _pending_gradients(self) -> torch.Tensor:
        """Return own gradients of earlier backwards; those which `zero_grad` has dropped since are zero or absent."""
        assert self.pending is not None
        for index, view in enumerate(self.bucket.views(self.pending)):
            gradient = self.parameters[index].grad
            if gradient is None:
                self._versions[index] = 0
                self.bucket.remove(self.pending, index)
            elif gradient._version != self._versions[index]:
                self._versions[index] = gradient._version
                if not gradient.any():
                    view.zero_()
        return self.pending


class _Sums:
    """State of a hub's sums in the current backward.

    Attributes:
        ranks: the ranks.
        is_deferred: whether gradients are kept for a later backward.
        buckets: the buckets of the hub.
    """

    def __init__(self, ranks: Ranks, before_reduction: Callable[[], None]) -> None:
        self.ranks = ranks
        self.is_deferred = False
        self.buckets: list[_HubBucket] = []
        self._before_reduction = before_reduction
        self._backward = -1  # task of autograd in which buckets are launched
        self._next = 0

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


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _place(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the facts that change if a script assigns other data to a parameter, be it a part of the old memory."""
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


class Hub:
    """Aliases of a module's parameters; their gradients are summed over ranks.

    Attributes:
        anchors: one scalar for each bucket; a call gives each a gradient.

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
        self._places = [(parameter, _place(parameter)) for parameter in parameters]
        plan = plan_buckets(parameters)
        self._sums = _Sums(ranks, before_reduction)
        self._sums.buckets += [_HubBucket(self._sums, [parameters[index] for index in members]) for members in plan]
        self._aliases: list[torch.Tensor] = []
        self.anchors: list[torch.Tensor] = []
        for bucket in self._sums.buckets:
            *aliases, anchor = bucket.aliases()
            self._aliases += aliases
            self.anchors.append(anchor)
        self._slots = ParameterSlots(module)
        self._entries = self._slots.entries(self._mapping(self._aliases))

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        parameters = [parameter for bucket in self._sums.buckets for parameter in bucket.parameters]
        return dict(zip(parameters, replacements, strict=True))

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters of the hub, in the same places with the same memory."""
        if len(parameters) != len(self._places):
            return False
        if not is_in_place(self._entries):
            return False
        return all(
            parameter is own and _place(parameter) == place
            for parameter, (own, place) in zip(parameters, self._places, strict=True)
        )

    @property
    def is_deferred(self) -> bool:
        """Whether gradients are kept for a later backward (`no_sync`)."""
        return self._sums.is_deferred

    @is_deferred.setter
    def is_deferred(self, value: bool) -> None:
        self._sums.is_deferred = value

    def aliases(self) -> list[torch.Tensor]:
        """Return the aliases of the parameters, in the order of buckets."""
        return list(self._aliases)

    def aliases_in_place(self) -> AbstractContextManager[None]:
        """Put the aliases into the module during a block."""
        return replaced(self._entries)

    def in_place(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Put other tensors, in the order of `aliases`, into the module during a block."""
        return replaced(self._slots.entries(self._mapping(tensors)))

    def require_no_pending(self) -> None:
        """Require that all gradients of `no_sync` were summed.

        Raises:
            RunError: an optimizer steps before a backward outside of `no_sync`.
        """
        if any(bucket.pending is not None for bucket in self._sums.buckets):
            raise RunError(
                "the optimizer steps with gradients of samestep.no_sync that were not summed over ranks",
                expected="a backward outside of samestep.no_sync before the step",
                fix="end the block before the last backward of the step",
                code="E_RUN",
            )
