"""Hub of a module's parameters: sums the gradients of all calls over ranks once per backward.

    parameter -> Wait -> Launch -> alias, used by the calls
    parameter -> Wait -> Launch -> Collect -> alias, used by one slice of the calls, if this rank
    has several slices

One pair of Wait and Launch for each bucket. Launch runs when the gradients of its bucket are
complete and starts their sum; Wait runs after everything else of the backward and returns the sum.
So sums overlap with the backward, and autograd adds the gradients of several calls, and those of
uses outside of calls, by its own rules. Collect keeps the gradients of its slice, so that they are
added to those of other slices in the order of the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from samestep.errors import RunError
from samestep.reduce.fast import Node, Reduction
from samestep.view.bucket_layout import Bucket, plan_buckets
from samestep.view.crossings import leave
from samestep.view.module_tensors import ParameterSlots, is_in_place, replaced
from samestep.view.strategy import CallParameters

_FIRST = 2**63  # sequence number of a node that runs as soon as its inputs are complete
_LAST = 0  # of one that runs when no other node can
# Receives the gradients of aliases, and returns those of the tensors.
_Back = Callable[[Sequence[torch.Tensor | None]], Sequence[torch.Tensor | None]]


class _Aliases(torch.autograd.Function):
    """Wait, Launch or Collect: aliases of tensors, with a function for their gradients."""

    @staticmethod
    def forward(ctx: Any, back: _Back, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        ctx.set_materialize_grads(False)
        # Not `view_as`: a forward may change parameters in place, which autograd forbids for views
        # of a node.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.back(gradients))


def _aliases(back: _Back, tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Return aliases of tensors, from one node with a sequence number."""
    aliases: list[torch.Tensor] = list(_Aliases.apply(back, *tensors))  # type: ignore[no-untyped-call]
    node: Any = aliases[0].grad_fn
    node._set_sequence_nr(number)  # private, exists in torch 2.11 and 2.13
    return aliases


class _HubBucket(Bucket):
    """One bucket of a hub, and its gradients in the current backward.

    The graph of a call refers to it, so it must not refer to the graph: a cycle through nodes would
    never be freed.
    """

    def __init__(
        self, state: _State, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(tensors)
        self.leaves = leaves  # the script's parameters, with their gradients
        self.sums: dict[Node, torch.Tensor] = {}  # flat gradients of own slices
        self.is_complete = False  # `sums` has the gradients of all own slices
        self.work: Any = None
        self.pending: torch.Tensor | None = None  # own gradients of `no_sync`
        self._state = state
        self._parts: dict[int, Sequence[torch.Tensor | None]] = {}  # of slices, with a graph
        # For each parameter: whether the current backward has a gradient here, and the version of
        # `.grad` when it was last looked at.
        self._has_gradient: list[bool] = []
        self._versions: list[int] = []
        self._hooks: list[Any] = []  # of the parameters, while gradients are pending

    def aliases(self) -> list[list[torch.Tensor]]:
        """Return new aliases of the parameters, and the anchor, for each own slice."""
        waiting = _aliases(self.finish, self.parameters, _LAST)
        # The anchor has a gradient in every backward of a call, also if no own row uses a parameter
        # of the bucket.
        anchor = torch.zeros((), device=self.device)
        launching = _aliases(self.launch, [*waiting, anchor], _FIRST)
        own = self._state.reduction.own
        if len(own) == 1:
            return [launching]
        return [_aliases(partial(self.collect, number), launching, _FIRST) for number in own]

    def clear(self) -> None:
        """Forget the gradients of an earlier backward."""
        self.sums = {}
        self.is_complete = False
        self.work = None
        self._parts = {}

    def collect(
        self, number: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Keep the gradients of an own slice; return that of the anchor for one slice only."""
        *own, anchor = gradients
        # `create_graph`: copies in a flat tensor would have no graph.
        if torch.is_grad_enabled():
            self._parts[number] = own
        else:
            self._state.begin_backward()
            flat = self.fill(_dense(own))
            self.sums = self._state.reduction.merge({(number, number + 1): flat, **self.sums})
        if number != self._state.reduction.own.start:
            anchor = None
        # `launch` takes the other gradients from this bucket.
        return [*[None] * len(own), anchor]

    def launch(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Start the sum of own gradients. The returned tensors only carry the order of nodes."""
        *gradients, _ = gradients  # that of the anchor
        own = self._state.reduction.own
        if torch.is_grad_enabled():  # create_graph: crossings that can be differentiated
            return [*self._leave([self._parts.get(number, gradients) for number in own]), None]
        self._state.begin_backward()
        if len(own) == 1:
            gradients = _dense(gradients)
            self._has_gradient = [gradient is not None for gradient in gradients]
            if self.pending is None:
                flat = self.fill(gradients)
            else:  # in place: a new flat tensor would move all gradients once more
                flat = self._pending_gradients(self.pending)
                self.add(flat, gradients)
            self.sums = {(own.start, own.stop): flat}
        self.is_complete = True
        if not self._state.is_deferred:
            self.pending = None
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._state.start_in_order()
        # Views of the same memory, so that this takes no time; `finish` replaces them.
        return [*self.views(next(iter(self.sums.values()))), None]

    def _leave(self, slices: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Return sums of gradients of the own slices over all, which can be differentiated."""
        self._parts = {}
        results: list[torch.Tensor | None] = []
        for parts in zip(*slices, strict=True):
            result = None
            present = [part for part in parts if part is not None]
            if present:
                # Rarely needed: mostly all slices use a parameter, or none does.
                filled = [torch.zeros_like(present[0]) if one is None else one for one in parts]
                result = leave(filled, self._state.reduction)
            results.append(result)
        return results

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Wait for the sum and return the gradients of the parameters."""
        # Without gradients of this bucket, autograd does not need them.
        if torch.is_grad_enabled() or not self.is_complete:
            return gradients
        if self._state.is_deferred:
            (flat,) = self.sums.values()
            self.clear()
            return self._defer(flat)
        if self.work is None:
            self._state.start_all()
        flat = self._state.reduction.wait(self.work)
        self.clear()
        return self.gradients(flat)

    def _defer(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        """Keep gradients for a later backward; return zeros where a parameter has none."""
        if self.pending is None:
            self.pending = flat
            versions = [0 if one.grad is None else one.grad._version for one in self.leaves]
            self._versions = versions

            # `zero_grad` writes too: only writes between two accumulations are its own.
            def note(index: int, parameter: torch.Tensor) -> None:
                if parameter.grad is not None:
                    versions[index] = parameter.grad._version

            self._hooks = [
                one.register_post_accumulate_grad_hook(partial(note, index))
                for index, one in enumerate(self.leaves)
            ]
        # `.grad` exists from the first backward on, so that `zero_grad` can be seen.
        marks: list[torch.Tensor | None] = [None] * len(self.parameters)
        for index, leaf in enumerate(self.leaves):
            if self._has_gradient[index] and leaf.grad is None:
                marks[index] = torch.zeros_like(self.parameters[index])
        return marks

    def _pending_gradients(self, pending: torch.Tensor) -> torch.Tensor:
        """Return gradients of earlier backwards, without those that `zero_grad` has dropped."""
        for index, view in enumerate(self.views(pending)):
            gradient = self.leaves[index].grad
            if gradient is None:
                self._versions[index] = 0
                self.remove(pending, index)
            elif gradient._version != self._versions[index]:
                self._versions[index] = gradient._version
                if not self._state.memory_of(gradient).any():
                    view.zero_()
        return pending


def _dense(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    dense = list(gradients)
    for index, gradient in enumerate(dense):
        if gradient is not None and gradient.is_sparse:
            dense[index] = gradient.to_dense()
    return dense


class _State:
    """State of a hub in the current backward, without its graph.

    Attributes:
        reduction: sums over all slices.
        is_deferred: whether gradients are kept for a later backward.
        buckets: the buckets of the hub.
        memory_of: returns the tensor with the memory of a parameter, or of its gradient.
    """

    def __init__(
        self,
        reduction: Reduction,
        before_reduction: Callable[[], None],
        memory_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.reduction = reduction
        self.memory_of = memory_of
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
        # A backward that failed may have left gradients.
        for bucket in self.buckets:
            bucket.clear()
        if not self.is_deferred:
            self._before_reduction()

    def start_in_order(self) -> None:
        """Start the sums of complete buckets, in the order of buckets on all ranks."""
        # Started when ready, in whatever order, sums of different buckets could be paired.
        while self._next < len(self.buckets) and self.buckets[self._next].is_complete:
            bucket = self.buckets[self._next]
            bucket.work = self.reduction.start(bucket.sums)
            self._next += 1

    def start_all(self) -> None:
        """Start the sums that wait for a bucket which this backward does not need."""
        for bucket in self.buckets[self._next :]:
            if bucket.is_complete and bucket.work is None:
                bucket.work = self.reduction.start(bucket.sums)
        self._next = len(self.buckets)


def _place(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the facts that change if a script assigns other data, or a part of the old memory."""
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()


class Hub(CallParameters):
    """Aliases of a module's parameters; their gradients are summed over ranks.

    Attributes:
        anchors: one scalar for each bucket and own slice; a call gives each a gradient.

    Args:
        module: the module.
        parameters: its parameters that require gradients.
        reduction: sums over all slices.
        before_reduction: called once in each backward before the first sum.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        before_reduction: Callable[[], None],
    ) -> None:
        self._places = [(one, _place(self.memory_of(one))) for one in parameters]
        tensors = [self._in_graph(one) for one in parameters]
        self._state = _State(reduction, before_reduction, self.memory_of)
        for members in plan_buckets(tensors):
            leaves = [parameters[index] for index in members]
            own = [tensors[index] for index in members]
            self._state.buckets.append(_HubBucket(self._state, leaves, own))
        self._slots = ParameterSlots(module)
        self._aliases: list[list[torch.Tensor]] = [[] for _ in reduction.own]
        self.anchors: list[torch.Tensor] = []
        for bucket in self._state.buckets:
            for own, (*aliases, anchor) in zip(self._aliases, bucket.aliases(), strict=True):
                own.extend(aliases)
                self.anchors.append(anchor)
        self._entries = [self._slots.entries(self._mapping(aliases)) for aliases in self._aliases]

    def _mapping(self, replacements: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        parameters = [leaf for bucket in self._state.buckets for leaf in bucket.leaves]
        return dict(zip(parameters, replacements, strict=True))

    @staticmethod
    def memory_of(tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with the memory of a parameter, or of its gradient."""
        return tensor

    def _in_graph(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this rank for a parameter, in the graph of the parameter."""
        return parameter

    def is_current(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters of the hub, in the same places with the same memory."""
        if len(parameters) != len(self._places):
            return False
        if not is_in_place(self._entries[0]):
            return False
        return all(
            parameter is own and _place(self.memory_of(parameter)) == place
            for parameter, (own, place) in zip(parameters, self._places, strict=True)
        )

    @property
    def is_deferred(self) -> bool:
        """Whether gradients are kept for a later backward (`no_sync`)."""
        return self._state.is_deferred

    @is_deferred.setter
    def is_deferred(self, value: bool) -> None:
        self._state.is_deferred = value

    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the aliases of the parameters for an own slice, in the order of buckets."""
        return list(self._aliases[position])

    def aliases_in_place(self, position: int) -> AbstractContextManager[None]:
        """Put the aliases for an own slice into the module during a block."""
        return replaced(self._entries[position])

    def in_place(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Put other tensors, in the order of `aliases`, into the module during a block."""
        return replaced(self._slots.entries(self._mapping(tensors)))

    def require_no_pending(self) -> None:
        """Require that all gradients of `no_sync` were summed.

        Raises:
            RunError: an optimizer steps before a backward outside of `no_sync`.
        """
        if any(bucket.pending is not None for bucket in self._state.buckets):
            raise RunError(
                "the optimizer steps with gradients of samestep.no_sync "
                "that were not summed over ranks",
                expected="a backward outside of samestep.no_sync before the step",
                fix="end the block before the last backward of the step",
                code="E_RUN",
            )
