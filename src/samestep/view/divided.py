"""One divided call: own slices of the arguments, the forward of each, one word, whole outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import IntEnum, auto
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from samestep.distributed.devices import is_accelerator
from samestep.distributed.rng import generator_state
from samestep.view.crossings import CallExchange
from samestep.view.inner_graph import InnerSlice
from samestep.view.kinds import Kind, numbers_hash, operations_hash
from samestep.view.leaves import flatten
from samestep.view.messages import Action
from samestep.view.operations import RULES, Operation, Operations
from samestep.view.outputs import OutputCrossing
from samestep.view.region import Region, inside
from samestep.view.slice_threads import Part, ThreadModes, nodes_of, order_nodes, run_in_lockstep
from samestep.view.snapshot import Snapshot
from samestep.view.strategy import Call, CallParameters, OwnResult, Strategy
from samestep.view.view import View

OTHER_OPERATIONS = "operations that were not tried"
_ENDED_EARLY = "a rank could not compute its rows alone"


class _Status(IntEnum):
    """Status of a rank at the end of a divided call."""

    OK = auto()
    FAILED = auto()
    UNKNOWN = auto()  # operations that were not tried, or changes of state that were not watched


_UNEQUAL = -1  # a fact that is not the same in all own slices


def _only(facts: set[Any]) -> int:
    """Return the fact of all own slices."""
    return facts.pop() if len(facts) == 1 else _UNEQUAL


def without_compiler(kind: Kind) -> AbstractContextManager[Any]:
    """Run compiled parts without the compiler, which hides their operations and random draws."""
    if kind.is_compiled:
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


class DividedCall:
    """One divided call on this rank.

    Args:
        view: the view of this process.
        strategy: computes the inside of the call.
        kind: kind of the call, with its division.
        call: the call.
        local_batch_norm: batch norm uses the statistics of the own rows.
    """

    def __init__(
        self,
        view: View,
        strategy: Strategy,
        kind: Kind,
        call: Call,
        *,
        local_batch_norm: bool,
    ) -> None:
        assert kind.division is not None
        division = kind.division
        is_exact = strategy.is_exact
        # The script's generator advances before the snapshot: slices begin after it.
        seed = view.draw_seed(division.draw_factors, is_exact=is_exact)
        self._view = view
        self._strategy = strategy
        self._kind = kind
        self._division = division
        self._call = call
        self._has_other_changes = False
        self._before = Snapshot(call.parts, kind.written, view.device)
        expected = kind.exchanges
        if is_exact and not division.sums:
            expected = ()
        # No word precedes the sums of stages, which ranks reach at different times.
        self._exchange = CallExchange(
            strategy.reduction, expected, lambda: strategy.has_stages or view.all_ranks_in_sum()
        )
        # Under `exact` calls are observed: code that is compiled for one number of rows has other
        # bits than that for several. Otherwise a function mode would be compiled too.
        self._known: Sequence[Operation] | None = None
        if kind.is_compiled and not is_exact and RULES.keys().isdisjoint(kind.last):
            self._known = kind.last
        self._parameters: CallParameters | None = None
        self._regions: list[Region] = []
        slices = call.slices
        for microbatches, span in zip(slices.microbatches, slices.own_bounds, strict=True):
            region = Region(call.rows, *span, self._exchange, division.draw_factors)
            region.local_batch_norm = local_batch_norm
            if is_exact or is_accelerator(view.device):
                region.microbatches = microbatches
                region.seed = seed
            if kind.uses_checkpointing:
                region.positions = {}
            self._regions.append(region)

    def own_results(self) -> list[OwnResult] | None:
        """Run the forward on each own slice; return None if it fails here, and let no rank wait."""
        view = self._view
        # Messages follow, in which a rank elsewhere would never join.
        if self._strategy.exchanges_in_calls or self._exchange.expected != ():
            view.require_same_action(view.word(Action.ENTER_CALL))
        self._call.operations = self._division.operations
        self._parameters = self._strategy.parameters(self._call)
        forward = self._call.forward
        stance: AbstractContextManager[Any] = nullcontext()
        if self._known is None:
            forward = self._call.eager
            stance = without_compiler(self._kind)
        try:
            with stance:
                results = self._forwards(forward)
            self._exchange.require_all_sums()
        except Exception:  # boundary: the whole call raises the script's own one on all ranks
            if self._parameters is None:
                self._exchange.leave(view.device)
            else:
                self._parameters.leave(self._exchange, view.device)
            return None
        return results

    def _forwards(self, forward: Callable[..., Any]) -> list[OwnResult]:
        parameters = self._parameters
        strategy = self._strategy
        try:
            arguments = self._call.own_leaves(
                strategy.ranks, strategy.reduction, self._division.inputs
            )
            if self._division.sums and len(arguments) > 1:
                return self._in_lockstep(forward, arguments)
            results = []
            for position, own in enumerate(arguments):
                if position:  # each slice sees the state before the call
                    self._before.restore()
                results.append(self._forward_of_slice(forward, position, own))
                self._note_state(results[-1])
            if parameters is not None:
                for result in results:
                    result.finish(parameters)
            return results
        finally:
            if parameters is not None:
                parameters.end_forward()

    def _forward_of_slice(
        self, forward: Callable[..., Any], position: int, own: list[Any]
    ) -> OwnResult:
        region = self._regions[position]
        parameters = self._parameters
        if parameters is None:  # the module's own
            return self._run(region, forward, own)
        recomputes = self._kind.uses_checkpointing
        if (parameters.needs_inner_graph or recomputes) and torch.is_grad_enabled():
            run = partial(self._run, region)
            inner = InnerSlice(run, forward, own, region, parameters, position)
            return inner.result_in_graph()
        with parameters.aliases_in_place(position):
            return self._run(region, parameters.forward(forward), own)

    def _run(self, region: Region, forward: Callable[..., Any], own: Sequence[Any]) -> OwnResult:
        operations = Operations(region)
        observed: AbstractContextManager[Any] = nullcontext()
        if self._known is None:
            observed = operations
        else:
            operations.functions = list(self._known)
        arguments, options = tree_unflatten(list(own), self._call.spec)
        with inside(region), observed:
            result = forward(*arguments, **options)
        leaves, spec = flatten(result)
        return OwnResult(leaves, spec, operations, result)

    def _note_state(self, result: OwnResult) -> None:
        """Note the state after an own slice, without its aliases of parameters."""
        if self._strategy.is_exact:  # otherwise a rank with fewer slices would change it less often
            self._has_other_changes |= bool(self._before.changes())
            result.operations.numbers += self._before.values()

    def _in_lockstep(
        self, forward: Callable[..., Any], arguments: Sequence[list[Any]]
    ) -> list[OwnResult]:
        """Run the forward on the own slices at once, since each needs sums over all of them."""
        before = self._before
        device = self._view.device
        parameters = self._parameters
        modes = ThreadModes(device)
        if parameters is not None:
            forward = parameters.forward(forward)
        shared = before.shared_statistics()
        positions = range(len(arguments))
        buffers = [before.buffers_of_slice(copied=number > 0) for number in positions]
        generators = generator_state(device)

        def compute(position: int, part: Part) -> OwnResult:
            region = replace(self._regions[position], exchange=part)
            if position:
                region.shared_statistics = shared  # the first slice updates them
            with modes.installed():
                return self._run(region, forward, arguments[position])

        @contextmanager
        def turn(position: int) -> Iterator[None]:
            aliases: AbstractContextManager[None] = nullcontext()
            if parameters is not None:
                aliases = parameters.aliases_in_place(position)
            with buffers[position].installed(), aliases:
                yield

        parts = [Part(partial(compute, number), partial(turn, number)) for number in positions]
        threads = self._view.slice_threads
        results: list[OwnResult] = run_in_lockstep(parts, self._exchange, threads)
        if generator_state(device) != generators:
            self._has_other_changes = True  # each slice has drawn after the one before
        # In reverse: the buffers after the first slice stay.
        for own, result in zip(reversed(buffers), reversed(results), strict=True):
            own.install()
            self._note_state(result)
        inputs: list[Any] = list(arguments)
        if parameters is not None:
            for result in results:
                result.finish(parameters)
            inputs += [parameters.aliases(number) for number in positions]
            inputs += parameters.placed
        if torch.is_grad_enabled():
            order_nodes(parts, [result.leaves for result in results], nodes_of(inputs))
        return results

    def difference(self, results: list[OwnResult] | None) -> str | None:
        """Exchange one word about the own slices; return why the call must be computed whole."""
        if self._exchange.is_known_to_all:
            return _ENDED_EARLY
        words = self._view.word(Action.END_CALL, *self._facts(results))
        if any(word[0] == Action.SUM_IN_CALL for word in words):
            return _ENDED_EARLY
        self._view.require_same_action(words)
        columns = list(zip(*words, strict=True))[2:6]
        statuses, *facts = map(set, columns)
        operations, shapes, numbers = (len(one) > 1 or _UNEQUAL in one for one in facts)
        # In this order: only operations that all slices share can be tried again.
        difference = None
        if _Status.FAILED in statuses:
            difference = _ENDED_EARLY
        elif operations:
            difference = "operations that differ between rows"
        elif _Status.UNKNOWN in statuses:
            difference = OTHER_OPERATIONS
        elif shapes:
            difference = "outputs of other shapes in some rows"
        elif numbers:
            difference = "Python numbers that differ between rows"
        return difference

    def _facts(self, results: list[OwnResult] | None) -> list[int]:
        """Return the status of this rank and facts of all slices: operations, shapes, numbers."""
        if results is None:
            return [_Status.FAILED, 0, 0, 0]
        shapes = {self._shapes(*pair) for pair in zip(self._regions, results, strict=True)}
        if None in shapes:
            return [_Status.FAILED, 0, 0, 0]
        operations = {tuple(result.operations.functions) for result in results}
        numbers = {numbers_hash(result.operations.numbers) for result in results}
        status = _Status.OK
        if self._has_other_changes or not all(map(self._kind.divides, operations)):
            status = _Status.UNKNOWN
        hashes = {operations_hash(one) for one in operations}
        return [status, _only(hashes), _only(shapes), _only(numbers)]

    def _shapes(self, region: Region, result: OwnResult) -> int | None:
        """Return a number below 2**62 for the facts that outputs of all slices share.

        None if the outputs do not have the structure and the rows of the trial.
        """
        outputs = self._division.outputs
        if result.spec != self._kind.outputs or len(result.leaves) != len(outputs):
            return None
        facts = []
        for leaf, output in zip(result.leaves, outputs, strict=True):
            rows = output.factor * region.own
            is_tensor = isinstance(leaf, torch.Tensor)
            fits = is_tensor != (output.kind in ("value", "count"))
            if output.kind == "count":
                fits = not is_tensor and leaf == rows
            if fits and is_tensor:
                start = 0
                if output.kind == "rows":
                    start = 1
                    fits = leaf.dim() > 0 and leaf.shape[0] == rows
                elif output.kind in ("mean", "sum"):
                    fits = leaf.is_floating_point()
                # Not the dtype, of which the hash differs between processes.
                dtype = leaf.element_size(), leaf.is_floating_point()
                facts.append((*dtype, leaf.requires_grad, *leaf.shape[start:]))
            if not fits:
                return None
        return hash(tuple(facts)) & (2**62 - 1)  # hashes of integers are equal in all processes

    def undo(self) -> None:
        """Put the state before the call back, and forget its forward."""
        self._before.restore()
        if self._parameters is not None:
            self._parameters.abandon()

    def whole_outputs(self, results: Sequence[OwnResult]) -> Any:
        """Return the outputs of the whole batch, and note what the call has shown about its kind.

        Args:
            results: outputs of the own slices, which all ranks have computed.
        """
        kind = self._kind
        call = self._call
        first = results[0]
        self._exchange.end_forward()
        kind.exchanges = tuple(self._exchange.sums)
        kind.known[tuple(first.operations.functions)] = self._division
        # Sorted: the order of a set of texts differs between processes.
        buffers = sorted(place for place in kind.written if isinstance(place, tuple))
        self._strategy.share_buffers([(call.parts[index], name) for index, name in buffers])
        self._before.forget_unwritten()  # an inner graph may keep the snapshot
        # A tensor that stands in several places is gathered once.
        places: dict[int, int] = {}
        for place, leaf in enumerate(first.leaves):
            if isinstance(leaf, torch.Tensor):
                places.setdefault(id(leaf), place)
        outputs = [self._division.outputs[place] for place in places.values()]
        tensors = [result.leaves[place] for result in results for place in places.values()]
        crossing = OutputCrossing(
            self._view, self._strategy, call.slices, outputs, tensors, self._parameters
        )
        crossing.has_sums = bool(kind.exchanges) and not self._strategy.has_stages
        whole = dict(zip(places, crossing.whole(tensors), strict=True))
        leaves: list[Any] = []
        for leaf, output in zip(first.leaves, self._division.outputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaves.append(whole[id(leaf)])
            elif output.kind == "count":
                leaves.append(output.factor * call.rows)
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, first.spec)
