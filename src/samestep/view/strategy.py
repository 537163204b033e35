"""Interface of strategies: ways to compute the inside of the divided calls of one module.

The parts of a divided call (own rows, words, crossings, outputs) do not depend on the strategy. A
strategy

1. prepares the module once, in `samestep.parallel`: it divides or places the parameters, in place;
2. chooses the ranks that share the rows of a batch (`ranks`); ranks with the same number there
   compute the same rows;
3. gives each call its parameters (`CallParameters`), which sum gradients over the ranks;
4. surrounds whole calls and trials, in which the module has complete parameters.

Between calls the module looks as after `prepare`: a strategy that needs hooks or other classes
installs them inside of `CallParameters` only, so that watched calls, trials and keys of kinds see
the script's own module. Under every strategy all ranks of the view exchange words.

`strategies.replicated` is the simplest implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves

from samestep.distributed.world import World
from samestep.microbatches import Slices
from samestep.reduce.exact import ExactReduction
from samestep.reduce.fast import FastReduction, Reduction
from samestep.view.crossings import CallExchange, RowBounds, cut, enter
from samestep.view.leaves import flatten
from samestep.view.messages import Ranks
from samestep.view.operations import Operation, Operations
from samestep.view.rows_tensor import Rows, gathered, own_rows, with_all_rows


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: the module.
        parts: its submodules.
        forward: forward of the module's own class.
        eager: the same without a compiler.
        arguments: positional arguments.
        options: keyword arguments.
        leaves: leaves of both.
        spec: structure of both.
        rows: rows of the batch.
        slices: slices of the batch.
        operations: operations that the division of the call was tried with.
        is_tried_again: whether a divided computation had operations that were not tried.
    """

    module: nn.Module
    parts: Sequence[nn.Module]
    forward: Callable[..., Any]
    eager: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    rows: int
    slices: Slices
    operations: Sequence[Operation] = ()
    is_tried_again: bool = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that require gradients, each once."""
        # Not `module.parameters()`, a recursion of generators: this runs in every call.
        collected: dict[nn.Parameter, None] = {}
        for part in self.parts:
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    collected[parameter] = None
        return list(collected)

    def has_differentiated_arguments(self) -> bool:
        """Whether a backward of the call gives gradients to an argument."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors)

    def gather(self) -> None:
        """Gather arguments of which other rows are elsewhere."""
        if any(isinstance(leaf, Rows) for leaf in self.leaves):
            self.arguments, self.options = with_all_rows((self.arguments, self.options))
            self.leaves = tree_leaves((self.arguments, self.options))

    def own_leaves(
        self, ranks: Ranks, reduction: Reduction, is_cut: Sequence[bool]
    ) -> list[list[Any]]:
        """Return the leaves of the arguments for each own slice.

        Args:
            ranks: ranks that share the rows.
            reduction: sums over all slices.
            is_cut: for each leaf whether it is cut into rows.
        """
        rows = RowBounds(ranks, self.slices)
        count = len(reduction.own)
        own: list[list[Any]] = [[] for _ in range(count)]
        # By identity: attention asks whether query and key are one tensor.
        cuts: dict[int, list[torch.Tensor]] = {}
        for leaf, has_own_rows in zip(self.leaves, is_cut, strict=True):
            parts: list[Any] = [leaf] * count
            if isinstance(leaf, torch.Tensor):
                # Own rows give only a part of the gradient of a shared tensor.
                if not has_own_rows and leaf.requires_grad and torch.is_grad_enabled():
                    parts = enter(gathered(leaf), reduction, count)
                elif not has_own_rows:
                    parts = [gathered(leaf)] * count
                elif id(leaf) not in cuts:
                    cuts[id(leaf)] = parts = _own_rows(leaf, rows)
                else:
                    parts = cuts[id(leaf)]
            for leaves, part in zip(own, parts, strict=True):
                leaves.append(part)
        return own


def _own_rows(leaf: torch.Tensor, rows: RowBounds) -> list[torch.Tensor]:
    """Return the rows of each own slice. Those of Rows are here, and their gradients stay here."""
    if isinstance(leaf, Rows):
        bounds = leaf._rows_bounds
        if bounds.factor == 1 and bounds.has_slices(rows.slices):
            return [own_rows(leaf)]
    return cut(gathered(leaf), rows)


class CallParameters(ABC):
    """Parameters in the graph of divided calls.

    With a flat graph, `aliases_in_place` surrounds the forward of an own slice, whose graph is part
    of the script's.

    With an inner graph, one node of the script's graph runs forward and backward of the slice: it
    receives `aliases`, makes leaves of them, and returns their gradients. A strategy that sums
    gradients in its backward returns the sums.

    Attributes:
        needs_inner_graph: calls have inner graphs, whether or not they use checkpointing.
        anchors: scalars to which every backward of a call gives a gradient.
        placed: tensors of nodes with their own place in the order of a backward.
    """

    needs_inner_graph = False
    anchors: Sequence[torch.Tensor] = ()
    placed: Sequence[torch.Tensor] = ()

    @abstractmethod
    def aliases(self, position: int) -> list[torch.Tensor]:
        """Return the tensors of the script's graph that stand for the parameters in an own slice.

        Args:
            position: place of the slice among the own ones.
        """

    def aliases_in_place(self, position: int) -> AbstractContextManager[None]:
        """Surround the forward of an own slice in a flat graph: aliases are the parameters."""
        return self.in_place(self.aliases(position))

    @abstractmethod
    def in_place(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Surround the forward of a slice with an inner graph: `leaves` are the parameters."""

    def in_backward(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Surround the backward of a slice with an inner graph, which may recompute parts of it."""
        return self.in_place(leaves)

    def leaves(self, aliases: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return leaves of an inner graph."""
        return [alias.detach().requires_grad_(alias.requires_grad) for alias in aliases]

    def take_gradients(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients of the leaves after the backward of a slice, and forget them."""
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    def leave(self, exchange: CallExchange, device: torch.device) -> None:
        """Leave the call after a failure here: take part in messages that other ranks wait for.

        Args:
            exchange: exchange of the call.
            device: device of its messages.
        """
        exchange.leave(device)

    def end_forward(self) -> None:  # noqa: B027  # most strategies have no memory to free
        """Notice the end of the forwards of all own slices."""

    def begin_backward(self) -> None:  # noqa: B027
        """Notice a backward of the call, before the first own slice. Called for each call in it."""

    def abandon(self) -> None:  # noqa: B027  # most strategies keep nothing of a forward
        """Forget the forward of the call, which all ranks compute again whole."""

    def forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that computes an own slice, in place of the module's own forward."""
        return forward

    def finish(self, result: Any) -> Any:
        """Return the result of `forward` for an own slice, after the forwards of all own slices."""
        return result


@dataclass
class OwnResult:
    """Result of the forward of an own slice.

    Attributes:
        leaves: leaves of the outputs.
        spec: their structure.
        operations: operations of the forward.
        returned: result of the forward; None after `finish`, so that it keeps no graph alive.
    """

    leaves: list[Any]
    spec: TreeSpec
    operations: Operations
    returned: Any = None

    def finish(self, parameters: CallParameters) -> None:
        """Complete the result after the forwards of all own slices."""
        result = parameters.finish(self.returned)
        if result is not self.returned:
            self.leaves, self.spec = flatten(result)
        self.returned = None


class Strategy(ABC):
    """A way to compute the inside of the calls of one module.

    Attributes:
        has_stages: ranks compute stages of several own slices one after another. They reach sums
            inside of calls and of backwards at different times, and no words precede these.
        splits_module: ranks with the same rows compute different parts of the module, and have
            gradients of these.
        ranks: ranks that share the rows of a batch.
        reduction: sums over the slices of these ranks.
        exchanges_in_calls: ranks exchange messages in calls, whole ones too, which a word must
            precede.
        is_deferred: whether gradients may be kept for a later backward (`samestep.no_sync`).
        is_exact: results have the same bits on all numbers of ranks: each microbatch is a slice.

    Args:
        world: all ranks, with the configuration of the strategy and its mesh.
        ranks: see above.
        reduction: see above.
        before_reduction: called once in each backward before its first sum of gradients; sends a
            word.
        is_exact: see above.
    """

    has_stages = False
    splits_module = False
    exchanges_in_calls = False

    def __init__(
        self,
        world: World,
        ranks: Ranks,
        reduction: Reduction,
        before_reduction: Callable[[], None],
        *,
        is_exact: bool,
    ) -> None:
        self.ranks = ranks
        self.reduction = reduction
        self.is_deferred = False
        self.is_exact = is_exact
        self._world = world
        self._before_reduction = before_reduction

    def sum_slices(self, slices: Slices) -> None:
        """Set the reduction of calls with several own slices."""
        self.reduction = FastReduction(self.ranks, slices.own, self._world.strategy.hook)
        if self.is_exact:
            self.reduction = ExactReduction(self.ranks.world, len(slices.bounds))

    def of_copy(self) -> Strategy:
        """Return a strategy for a copy of the module, which is not prepared yet."""
        arguments = (self._world, self.ranks, self.reduction, self._before_reduction)
        return type(self)(*arguments, is_exact=self.is_exact)

    def prepare(self, module: nn.Module) -> None:  # noqa: B027  # replicas need no preparation
        """Divide or place the parameters of a module, in place. Called once, by all ranks."""

    def arguments(self, arguments: Any) -> Any:
        """Return the arguments of a call with complete tensors."""
        return arguments

    @abstractmethod
    def parameters(self, call: Call) -> CallParameters | None:
        """Return the parameters of a divided call.

        None if the module's own are right: they are complete, and the call has no gradients.
        """

    def whole(self, module: nn.Module) -> AbstractContextManager[None]:
        """Surround a whole call: complete parameters, with equal gradients on all ranks."""
        return nullcontext()

    def complete(self, module: nn.Module) -> AbstractContextManager[None]:
        """Surround a trial, or a copy of the module: complete parameters, which are leaves."""
        return nullcontext()

    def forward_of_trial(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that a trial computes, with complete parameters."""
        return forward

    def share_buffers(self, buffers: Sequence[tuple[nn.Module, str]]) -> None:  # noqa: B027
        """Make written buffers equal on ranks that compute the same rows, if they are not."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Prepare an optimizer for a step, and require that it can update the parameters.

        Raises:
            InputError: it was made before `prepare`.
            RunError: gradients of a backward were not summed.
        """
