"""One divided call: own rows of the arguments, the forward, one word, and the gathered outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from samestep.view.call import Call
from samestep.view.crossings import RowBounds, cut, enter
from samestep.view.division import Division, Output
from samestep.view.exchange import CallExchange
from samestep.view.hub import Hub
from samestep.view.inner import Inner, inner_graph
from samestep.view.leaves import Spec, flatten, unflatten
from samestep.view.operations import Operation, Operations
from samestep.view.ranks import Ranks
from samestep.view.region import Region, inside
from samestep.view.snapshot import Snapshot


@dataclass
class OwnResult:
    """Result of the forward of the own rows.

    Attributes:
        leaves: leaves of the outputs.
        spec: their structure.
        operations: operations of the forward.
    """

    leaves: list[Any]
    spec: Spec
    operations: Operations


def own_arguments(ranks: Ranks, division: Division, call: Call) -> list[Any]:
    """Return the leaves of the arguments of a call for the own rows."""
    rows = RowBounds(ranks, call.bounds)
    own = []
    cuts: dict[int, torch.Tensor] = {}  # by identity: attention asks whether query and key are one tensor
    for leaf, is_cut in zip(call.leaves, division.inputs, strict=True):
        if not isinstance(leaf, torch.Tensor):
            own.append(leaf)
        elif is_cut:
            if id(leaf) not in cuts:
                cuts[id(leaf)] = cut(leaf, rows)
            own.append(cuts[id(leaf)])
        elif leaf.requires_grad and torch.is_grad_enabled():
            own.append(enter(leaf, ranks))
        else:
            own.append(leaf)
    return own


class DividedCall:
    """One divided call on this rank.

    Args:
        ranks: the ranks.
        division: how the call is divided.
        call: the call.
        region: own rows.
        exchange: exchange of the region.
        before: state before the call.
        known: operations of a forward that is compiled, in which no rule applies; None if they must be observed.
    """

    def __init__(
        self,
        ranks: Ranks,
        division: Division,
        call: Call,
        region: Region,
        exchange: CallExchange,
        before: Snapshot,
        known: Sequence[Operation] | None = None,
    ) -> None:
        self.ranks = ranks
        self.division = division
        self.call = call
        self.region = region
        self.exchange = exchange
        self._before = before
        self._known = known

    def compute(self, forward: Callable[..., Any], hub: Hub | None) -> OwnResult:
        """Run the forward on the own rows, with the aliases of the hub as parameters."""
        own = own_arguments(self.ranks, self.division, self.call)
        if hub is None:
            return self._run(forward, own)
        if self.division.form == "inner":
            return self._run_inner(forward, own, hub)
        with hub.aliases_in_place():
            return self._run(forward, own)

    def _run(self, forward: Callable[..., Any], own: Sequence[Any]) -> OwnResult:
        operations = Operations(self.region)
        arguments, options = tree_unflatten(list(own), self.call.spec)
        if self._known is None:
            with inside(self.region), operations:
                result = forward(*arguments, **options)
        else:  # a function mode would be compiled too
            with inside(self.region):
                result = forward(*arguments, **options)
            operations.functions = list(self._known)
        leaves, spec = flatten(result)
        return OwnResult(leaves, spec, operations)

    def _run_inner(self, forward: Callable[..., Any], own: list[Any], hub: Hub) -> OwnResult:
        """Run the forward in a graph of its own. Its leaves are the aliases, and the arguments with gradients."""
        places = [index for index, leaf in enumerate(own) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        aliases = hub.aliases()
        results: list[OwnResult] = []

        def compute(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            arguments = list(own)
            for place, leaf in zip(places, leaves[len(aliases) :], strict=True):
                arguments[place] = leaf
            with hub.in_place(leaves[: len(aliases)]):
                result = self._run(forward, arguments)
            inner.draws = result.operations.draws
            results.append(result)
            return [leaf for leaf in result.leaves if isinstance(leaf, torch.Tensor)]

        inner = Inner(self.region, compute, lambda leaves: hub.in_place(leaves[: len(aliases)]), self._before)
        outputs = iter(inner_graph(inner, [*aliases, *[own[place] for place in places]]))
        result = results.pop()  # a reference would keep the inner graph
        leaves = [next(outputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in result.leaves]
        return OwnResult(leaves, result.spec, result.operations)

    def fits(self, result: OwnResult, spec: Spec | None) -> bool:
        """Whether the outputs have the structure and the rows that the trial found."""
        if result.spec != spec or len(result.leaves) != len(self.division.outputs):
            return False
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor) == (output.kind in ("value", "count")):
                return False
            if output.kind == "count" and leaf != output.factor * self.region.own:
                return False
            if output.kind == "rows" and (leaf.dim() == 0 or leaf.shape[0] != output.factor * self.region.own):
                return False
            if output.kind in ("mean", "sum") and not leaf.is_floating_point():
                return False
        return True

    def shapes_hash(self, result: OwnResult) -> int:
        """Return a number below 2**62 for the facts that outputs of all ranks share."""
        facts = []
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                start = int(output.kind == "rows")
                facts.append((leaf.element_size(), leaf.is_floating_point(), leaf.requires_grad, *leaf.shape[start:]))
        return hash(tuple(facts)) & (2**62 - 1)  # hashes of integers are equal in all processes

    def whole_outputs(
        self, result: OwnResult, hub: Hub | None, before_backward: Callable[[Sequence[torch.Tensor | None]], None]
    ) -> Any:
        """Return the outputs of the whole batch. A tensor that stands in several places is gathered once.

        Args:
            result: outputs of the own rows.
            hub: hub of the parameters.
            before_backward: called in each backward with the gradients of the whole outputs.
        """
        places: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        kinds: list[Output] = []
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in places:
                places[id(leaf)] = len(tensors)
                tensors.append(leaf)
                kinds.append(output)
        crossing = OutputCrossing(
            self.ranks, self.call.bounds, self.region.own / self.region.rows, kinds, before_backward
        )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            anchors = [] if hub is None else hub.anchors
            whole = list(GatherOutputs.apply(crossing, *tensors, *anchors))  # type: ignore[no-untyped-call]
        else:
            whole = crossing.gather(tensors)
        leaves = []
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaves.append(whole[places[id(leaf)]])
            elif output.kind == "count":
                leaves.append(output.factor * self.region.rows)
            else:
                leaves.append(leaf)
        return unflatten(leaves, result.spec)


class OutputCrossing:
    """State for the end of a divided call, without its arguments: a graph keeps it as long as the loss lives.

    Args:
        ranks: the ranks.
        bounds: rows of each rank.
        share: own rows divided by the rows of the batch.
        outputs: the outputs that are tensors.
        before_backward: called in each backward with the gradients of the whole outputs.
    """

    def __init__(
        self,
        ranks: Ranks,
        bounds: Sequence[tuple[int, int]],
        share: float,
        outputs: Sequence[Output],
        before_backward: Callable[[Sequence[torch.Tensor | None]], None],
    ) -> None:
        self.outputs = outputs
        self.before_backward = before_backward
        self._ranks = ranks
        self._bounds = bounds
        self._share = share

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole value of each output, without a graph."""
        whole = []
        for tensor, output in zip(tensors, self.outputs, strict=True):
            if output.kind == "rows":
                whole.append(RowBounds(self._ranks, self._bounds, output.factor).gather(tensor))
            elif output.kind == "constant":
                whole.append(tensor.detach())
            else:
                # Summed in float64: the sum of rounded parts would be less exact than the whole loss.
                part = tensor.detach().double() * self._weight(output)
                whole.append(self._ranks.sum(part).to(tensor.dtype))
        return whole

    def _weight(self, output: Output) -> float:
        """Return the factor of the own part of an output that has no rows."""
        if output.kind == "sum":
            return 1.0
        return self._share

    def own_gradient(self, gradient: torch.Tensor, output: Output) -> torch.Tensor:
        """Return the gradient of an own output from that of the whole output. Differentiable."""
        if output.kind == "rows":
            return cut(gradient, RowBounds(self._ranks, self._bounds, output.factor))
        if gradient.requires_grad and torch.is_grad_enabled():
            gradient = enter(gradient, self._ranks)
        return gradient * self._weight(output)


class GatherOutputs(torch.autograd.Function):
    """End of a divided call: own outputs become whole outputs."""

    @staticmethod
    def forward(ctx: Any, crossing: OutputCrossing, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gather the outputs; further tensors are anchors."""
        count = len(crossing.outputs)
        ctx.crossing = crossing
        ctx.anchors = [tensor.device for tensor in tensors[count:]]
        ctx.set_materialize_grads(False)
        whole = crossing.gather(tensors[:count])
        ctx.mark_non_differentiable(
            *[value for value, own in zip(whole, tensors, strict=False) if not own.requires_grad]
        )
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the own outputs, and zeros for the anchors."""
        ctx.crossing.before_backward(gradients)
        own: list[torch.Tensor | None] = []
        for gradient, output in zip(gradients, ctx.crossing.outputs, strict=True):
            if gradient is None:
                own.append(None)
            else:
                own.append(ctx.crossing.own_gradient(gradient, output))
        # Without a gradient for its anchor, a bucket that no own row uses would not be summed on this rank.
        anchors = [torch.zeros((), device=device) for device in ctx.anchors]
        return (None, *own, *anchors)
