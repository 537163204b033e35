"""One divided call: own slices of the arguments, the forward of each, one word, and the gathered outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from samestep.distributed.rng import generator_state
from samestep.reduce.fast import Reduction
from samestep.view.crossings import CallExchange, RowBounds, cut, enter, replicated
from samestep.view.division import Division, Output
from samestep.view.inner import Inner, inner_graph
from samestep.view.kinds import Kind, numbers_hash, operations_hash
from samestep.view.leaves import flatten
from samestep.view.lockstep import Part, ThreadModes, nodes_of, order_nodes, run_in_lockstep
from samestep.view.operations import Operation, Operations
from samestep.view.ranks import Action, Ranks, Slices
from samestep.view.region import Region, inside
from samestep.view.rows import Rows, gathered, is_large, own_rows
from samestep.view.snapshot import Snapshot, StateOfSlice
from samestep.view.strategy import Call, CallParameters
from samestep.view.view import View


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


def own_arguments(
    ranks: Ranks, reduction: Reduction, division: Division, call: Call
) -> list[list[Any]]:
    """Return the leaves of the arguments of a call for each own slice."""
    rows = RowBounds(ranks, call.slices)
    count = len(reduction.own)
    own: list[list[Any]] = [[] for _ in range(count)]
    cuts: dict[
        int, list[torch.Tensor]
    ] = {}  # by identity: attention asks whether query and key are one tensor
    for leaf, is_cut in zip(call.leaves, division.inputs, strict=True):
        parts: list[Any] = [leaf] * count
        if isinstance(leaf, torch.Tensor):
            if is_cut:
                if id(leaf) not in cuts:
                    cuts[id(leaf)] = _own_argument(leaf, rows)
                parts = cuts[id(leaf)]
            elif leaf.requires_grad and torch.is_grad_enabled():
                parts = enter(gathered(leaf), reduction, count)
            else:
                parts = [gathered(leaf)] * count
        for leaves, part in zip(own, parts, strict=True):
            leaves.append(part)
    return own


def _own_argument(leaf: torch.Tensor, rows: RowBounds) -> list[torch.Tensor]:
    """Return the rows of each own slice. Those of Rows are here, and their gradients stay here."""
    if (
        isinstance(leaf, Rows)
        and leaf._rows_bounds.factor == 1
        and leaf._rows_bounds.has_slices(rows.slices)
    ):
        return [own_rows(leaf)]
    return cut(gathered(leaf), rows)


class DividedCall:
    """One divided call on this rank.

    Args:
        ranks: the ranks.
        reduction: sums over all slices.
        division: how the call is divided.
        call: the call.
        regions: own slices.
        exchange: exchange of the regions.
        before: state before the call.
        notes_state: whether to note the state after each slice: a rank with fewer slices would
            change it less often.
        known: operations of a forward that is compiled, in which no rule applies; None if they must
            be observed.
        output_rows: bounds of outputs that stay where they are, and the bytes of the smallest one.

    Attributes:
        has_other_changes: whether an own slice has changed state that calls of the kind have not
            changed so far.
    """

    def __init__(
        self,
        ranks: Ranks,
        reduction: Reduction,
        division: Division,
        call: Call,
        regions: Sequence[Region],
        exchange: CallExchange,
        before: Snapshot,
        *,
        notes_state: bool,
        known: Sequence[Operation] | None = None,
        output_rows: tuple[RowBounds, int] | None = None,
    ) -> None:
        self.ranks = ranks
        self.division = division
        self.call = call
        self.regions = regions
        self.exchange = exchange
        self._reduction = reduction
        self.has_other_changes = False
        self._before = before
        self._notes_state = notes_state
        self._known = known
        self._output_rows = output_rows

    def compute(
        self, forward: Callable[..., Any], parameters: CallParameters | None
    ) -> list[OwnResult]:
        """Run the forward on each own slice, with the parameters of its strategy."""
        try:
            return self._compute_slices(forward, parameters)
        finally:
            if parameters is not None:
                parameters.end_forward()

    def _compute_slices(
        self, forward: Callable[..., Any], parameters: CallParameters | None
    ) -> list[OwnResult]:
        arguments = own_arguments(self.ranks, self._reduction, self.division, self.call)
        if self.division.sums and len(arguments) > 1:
            return self._compute_in_lockstep(forward, parameters, arguments)
        results = []
        for position, own in enumerate(arguments):
            if position:  # each slice sees the state before the call
                self._before.restore()
            results.append(self._compute_slice(forward, parameters, position, own))
            self._note_state(results[-1])
        if parameters is not None:
            for result in results:
                result.finish(parameters)
        return results

    def _compute_slice(
        self,
        forward: Callable[..., Any],
        parameters: CallParameters | None,
        position: int,
        own: list[Any],
    ) -> OwnResult:
        region = self.regions[position]
        if parameters is None:
            return self._run(region, forward, own)
        is_inner = parameters.needs_inner_graph or self.division.form == "inner"
        if is_inner and torch.is_grad_enabled():
            return self._run_inner(region, forward, own, parameters, position)
        with parameters.aliases_in_place(position):
            return self._run(region, parameters.forward(forward), own)

    def _compute_in_lockstep(
        self,
        forward: Callable[..., Any],
        parameters: CallParameters | None,
        arguments: Sequence[list[Any]],
    ) -> list[OwnResult]:
        """Run the forward on the own slices at once, since each needs sums over all of them."""
        modes = ThreadModes(self.ranks.world.device)
        own_forward = forward if parameters is None else parameters.forward(forward)

        def compute(position: int, part: Part) -> OwnResult:
            region = replace(self.regions[position], exchange=part)
            if position:
                region.shared_statistics = shared
            with modes.installed():
                return self._run(region, own_forward, arguments[position])

        @contextmanager
        def turn(position: int, state: StateOfSlice) -> Iterator[None]:
            aliases: AbstractContextManager[None] = nullcontext()
            if parameters is not None:
                aliases = parameters.aliases_in_place(position)
            with state.installed(), aliases:
                yield

        count = len(arguments)
        device = self.ranks.world.device
        draws = self._before.has_draws or (
            bool(self.division.draw_factors) and self.regions[0].seed is None
        )
        states = [
            self._before.state_of_slice(copied=position > 0, draws=draws)
            for position in range(count)
        ]
        generators = generator_state(device)
        shared = self._before.shared_statistics()
        parts = [
            Part(partial(compute, position), partial(turn, position, states[position]))
            for position in range(count)
        ]
        results: list[OwnResult] = run_in_lockstep(parts, self.exchange)
        if (
            not draws and generator_state(device) != generators
        ):  # each slice has drawn after the one before
            self.has_other_changes = True
        for state, result in zip(
            reversed(states), reversed(results), strict=True
        ):  # that of the first one stays
            state.install()
            self._note_state(result)
        if parameters is not None:
            for result in results:
                result.finish(parameters)
        if torch.is_grad_enabled():
            inputs: list[Any] = list(arguments)
            if parameters is not None:
                inputs += [parameters.aliases(position) for position in range(count)]
                inputs += parameters.placed
            order_nodes(parts, [result.leaves for result in results], nodes_of(inputs))
        return results

    def _note_state(self, result: OwnResult) -> None:
        """Note the state after an own slice, without its aliases of parameters."""
        if self._notes_state:
            self.has_other_changes |= bool(self._before.changes())
            result.operations.numbers += self._before.values()

    def undo(self) -> None:
        """Put the state before the call back."""
        self._before.restore()

    def _run(self, region: Region, forward: Callable[..., Any], own: Sequence[Any]) -> OwnResult:
        operations = Operations(region)
        arguments, options = tree_unflatten(list(own), self.call.spec)
        if self._known is None:
            with inside(region), operations:
                result = forward(*arguments, **options)
        else:  # a function mode would be compiled too
            with inside(region):
                result = forward(*arguments, **options)
            operations.functions = list(self._known)
        leaves, spec = flatten(result)
        return OwnResult(leaves, spec, operations, result)

    def _run_inner(
        self,
        region: Region,
        forward: Callable[..., Any],
        own: list[Any],
        parameters: CallParameters,
        position: int,
    ) -> OwnResult:
        """Run the forward in a graph of its own. Its leaves are the aliases, and the arguments with gradients."""
        places = [
            index
            for index, leaf in enumerate(own)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        results: list[OwnResult] = []

        def compute(
            leaves: Sequence[torch.Tensor], parameters: CallParameters
        ) -> list[torch.Tensor]:
            arguments = list(own)
            count = len(leaves) - len(places)
            for place, leaf in zip(places, leaves[count:], strict=True):
                arguments[place] = leaf
            state = torch.get_rng_state()
            with parameters.in_place(leaves[:count]):
                result = self._run(region, parameters.forward(forward), arguments)
            if region.positions is not None:
                torch.set_rng_state(state)
            inner.draws = result.operations.draws
            results.append(result)
            return [leaf for leaf in result.leaves if isinstance(leaf, torch.Tensor)]

        recomputes = self.division.form == "inner"
        inner = Inner(region, compute, parameters, position, self._before, recomputes=recomputes)
        outputs = iter(inner_graph(inner, [*inner.aliases, *[own[place] for place in places]]))
        result = results.pop()  # a reference would keep the inner graph
        leaves = [
            next(outputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in result.leaves
        ]
        return OwnResult(leaves, result.spec, result.operations)

    def fits(self, position: int, result: OwnResult, spec: TreeSpec | None) -> bool:
        """Whether the outputs of an own slice have the structure and the rows of the trial."""
        own = self.regions[position].own
        if result.spec != spec or len(result.leaves) != len(self.division.outputs):
            return False
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor) == (output.kind in ("value", "count")):
                return False
            if output.kind == "count" and leaf != output.factor * own:
                return False
            if output.kind == "rows" and (leaf.dim() == 0 or leaf.shape[0] != output.factor * own):
                return False
            if output.kind in ("mean", "sum") and not leaf.is_floating_point():
                return False
        return True

    def shapes_hash(self, result: OwnResult) -> int:
        """Return a number below 2**62 for the facts that outputs of all slices share."""
        facts = []
        for leaf, output in zip(result.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                start = int(output.kind == "rows")
                facts.append(
                    (
                        leaf.element_size(),
                        leaf.is_floating_point(),
                        leaf.requires_grad,
                        *leaf.shape[start:],
                    )
                )
        return hash(tuple(facts)) & (2**62 - 1)  # hashes of integers are equal in all processes

    def whole_outputs(
        self,
        results: Sequence[OwnResult],
        parameters: CallParameters | None,
        before_backward: Callable[[Sequence[torch.Tensor | None]], None],
    ) -> Any:
        """Return the outputs of the whole batch. A tensor that stands in several places is gathered once.

        Args:
            results: outputs of the own slices.
            parameters: parameters of the call.
            before_backward: called in each backward with the gradients of the whole outputs.
        """
        self._before.forget_unwritten()  # a graph may keep this call
        first = results[0]
        numbers: dict[int, int] = {}
        places: list[int] = []
        for place, leaf in enumerate(first.leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                numbers[id(leaf)] = len(places)
                places.append(place)
        outputs = [self.division.outputs[place] for place in places]
        tensors = [result.leaves[place] for result in results for place in places]
        stays = [
            self._stays(tensor, output) for tensor, output in zip(tensors, outputs, strict=False)
        ]
        arguments = (self.ranks, self._reduction, self.call.slices, outputs, stays, before_backward)
        crossing = OutputCrossing(*arguments, parameters)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            anchors = [] if parameters is None else parameters.anchors
            whole = list(GatherOutputs.apply(crossing, *tensors, *anchors))  # type: ignore[no-untyped-call]
        else:
            whole = crossing.gather(tensors)
        if self._output_rows is not None:
            bounds, _ = self._output_rows
            for number, output in enumerate(outputs):
                if stays[number]:
                    whole[number] = Rows(whole[number], bounds.times(output.factor))
        leaves = []
        for leaf, output in zip(first.leaves, self.division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaves.append(whole[numbers[id(leaf)]])
            elif output.kind == "count":
                leaves.append(output.factor * self.call.rows)
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, first.spec)

    def _stays(self, tensor: torch.Tensor, output: Output) -> bool:
        """Whether an output is so large that its rows stay where they are."""
        if self._output_rows is None or output.kind != "rows":
            return False
        bounds, limit = self._output_rows
        return is_large(tensor, bounds.times(output.factor), limit)


class OutputCrossing:
    """State for the end of a divided call, without its arguments: a graph keeps it as long as the loss lives.

    Args:
        ranks: the ranks.
        reduction: sums over all slices.
        slices: slices of the batch.
        outputs: the outputs that are tensors.
        stays: for each whether its rows stay where they are.
        before_backward: called in each backward with the gradients of the whole outputs.
        parameters: parameters of the call.
    """

    def __init__(
        self,
        ranks: Ranks,
        reduction: Reduction,
        slices: Slices,
        outputs: Sequence[Output],
        stays: Sequence[bool],
        before_backward: Callable[[Sequence[torch.Tensor | None]], None],
        parameters: CallParameters | None,
    ) -> None:
        self.outputs = outputs
        self.stays = stays
        self.parameters = parameters
        self.before_backward = before_backward
        self._ranks = ranks
        self._reduction = reduction
        self._slices = slices
        rows = slices.bounds[-1][1]
        self._shares = [(stop - start) / rows for start, stop in slices.own_bounds]

    @property
    def tensors(self) -> int:
        """Number of tensors of all own slices."""
        return len(self.outputs) * len(self._shares)

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole value of each output, without a graph.

        Args:
            tensors: outputs of the first own slice, of the second, and so on.
        """
        whole = []
        for number, output in enumerate(self.outputs):
            parts = tensors[number :: len(self.outputs)]
            if self.stays[number]:
                whole.append(parts[0].detach())
            elif output.kind == "rows":
                whole.append(self._rows(output).gather(parts))
            elif output.kind == "constant":
                whole.append(parts[0].detach())
            else:
                # Summed in float64: the sum of rounded parts would be less exact than the whole
                # loss.
                weighted = [
                    part.detach().double() * weight
                    for part, weight in zip(parts, self._weights(output), strict=True)
                ]
                whole.append(self._reduction.sum(weighted).to(parts[0].dtype))
        return whole

    def _rows(self, output: Output) -> RowBounds:
        return RowBounds(self._ranks, self._slices, output.factor)

    def shown(self, gradient: torch.Tensor | None, number: int) -> torch.Tensor | None:
        """Return the gradient of an output as one of all rows."""
        if gradient is None or not self.stays[number]:
            return gradient
        return Rows(gradient, self._rows(self.outputs[number]))

    def _weights(self, output: Output) -> list[float]:
        """Return the factors of the parts of an output that has no rows."""
        if output.kind == "sum":
            return [1.0] * len(self._shares)
        return self._shares

    def own_gradients(self, gradient: torch.Tensor, output: Output) -> list[torch.Tensor]:
        """Return the gradients of an output of each own slice from that of the whole output. Differentiable."""
        if output.kind == "rows":
            return cut(gradient, self._rows(output))
        entered = [gradient] * len(self._shares)
        if gradient.requires_grad and torch.is_grad_enabled():
            entered = enter(gradient, self._reduction, len(self._shares))
        return [own * weight for own, weight in zip(entered, self._weights(output), strict=True)]


class GatherOutputs(torch.autograd.Function):
    """End of a divided call: own outputs become whole outputs."""

    @staticmethod
    def forward(
        ctx: Any, crossing: OutputCrossing, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gather the outputs; further tensors are anchors."""
        count = crossing.tensors
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
        crossing = ctx.crossing
        gradients = tuple(None if one is None else replicated(one) for one in gradients)
        crossing.before_backward(
            [crossing.shown(one, number) for number, one in enumerate(gradients)]
        )
        if crossing.parameters is not None:
            crossing.parameters.begin_backward()
        count = len(crossing.outputs)
        own: list[torch.Tensor | None] = [None] * crossing.tensors
        for number, (gradient, output) in enumerate(zip(gradients, crossing.outputs, strict=True)):
            if gradient is not None and crossing.stays[number]:
                own[number] = gradient
            elif gradient is not None:
                own[number::count] = crossing.own_gradients(gradient, output)
        # Without a gradient for its anchor, a bucket that no own row uses would not be summed on
        # this rank.
        zeros = {device: torch.zeros((), device=device) for device in set(ctx.anchors)}
        return (None, *own, *[zeros[device] for device in ctx.anchors])


OTHER_OPERATIONS = "operations that were not tried"
_BRANCHES = "operations that differ between rows"
_ENDED_EARLY = "a rank could not compute its rows alone"
# Status of a rank at the end of a divided call.
_OK = 1
_FAILED = 2
_UNKNOWN = 3  # operations that were not tried, or changes of state that were not watched
_OTHER_SHAPES = 4  # outputs of its slices differ
_OTHER_NUMBERS = 5
_OTHER_BRANCHES = 6  # operations of its slices differ


def difference_between_ranks(
    view: View, kind: Kind, divided: DividedCall, results: list[OwnResult] | None
) -> str | None:
    """Exchange one word about the own slices; return why the call must be computed whole, if it must."""
    if divided.exchange.is_known_to_all:
        return _ENDED_EARLY
    words = view.word(Action.END_CALL, *_facts(kind, divided, results))
    if any(word[0] == Action.SUM_IN_CALL for word in words):
        return _ENDED_EARLY
    view.require_same_action(words)
    statuses, lists, shapes, numbers = (
        set(column) for column in list(zip(*words, strict=True))[2:6]
    )
    difference = None
    if _FAILED in statuses:
        difference = _ENDED_EARLY
    elif _OTHER_BRANCHES in statuses or len(lists) > 1:
        difference = _BRANCHES
    elif _UNKNOWN in statuses:
        difference = OTHER_OPERATIONS
    elif _OTHER_SHAPES in statuses or len(shapes) > 1:
        difference = "outputs of other shapes in some rows"
    elif _OTHER_NUMBERS in statuses or len(numbers) > 1:
        difference = "Python numbers that differ between rows"
    return difference


def _facts(kind: Kind, divided: DividedCall, results: list[OwnResult] | None) -> list[int]:
    """Return the status of this rank, and the facts that all slices share: operations, shapes, numbers."""
    if results is None or not all(
        divided.fits(place, one, kind.outputs) for place, one in enumerate(results)
    ):
        return [_FAILED, 0, 0, 0]
    every = [
        (
            tuple(one.operations.functions),
            divided.shapes_hash(one),
            numbers_hash(one.operations.numbers),
        )
        for one in results
    ]
    operations, shapes, numbers = every[0]
    status = _OK
    if any(other[0] != operations for other in every):
        status = _OTHER_BRANCHES
    elif divided.has_other_changes or not kind.divides(operations):
        status = _UNKNOWN
    elif any(other[1] != shapes for other in every):
        status = _OTHER_SHAPES
    elif any(other[2] != numbers for other in every):
        status = _OTHER_NUMBERS
    return [status, operations_hash(operations), shapes, numbers]
