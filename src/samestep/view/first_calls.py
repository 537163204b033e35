"""Calls of a module that are computed whole, and first calls, which decide on later ones.

The first call of a kind is computed whole and watched, the second one is tried: a few rows, whole
and in parts. Then `ParallelModule` divides the calls of the kind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_unflatten

from samestep.config.exclusions import excluded
from samestep.errors import InputError
from samestep.view.divided import OTHER_OPERATIONS, without_compiler
from samestep.view.kinds import Kind, has_compiled_parts, has_rows
from samestep.view.leaves import flatten
from samestep.view.messages import Action
from samestep.view.module_state import ModuleState
from samestep.view.operations import Operations
from samestep.view.rows_tensor import with_all_rows
from samestep.view.snapshot import Snapshot
from samestep.view.strategy import Call, Strategy
from samestep.view.trial import try_division
from samestep.view.trial_result import ComputedWhole, Division, failure, shortened
from samestep.view.view import ModuleSummary, View
from samestep.view.watch import Watched, watch

_MOST_SURPRISES = 8  # calls of a kind that were divided and had to be computed again whole
_WHOLE = "some calls computed whole on every process: {}"


@dataclass(frozen=True)
class CallOptions:
    """Options of the calls of one module; see `samestep.parallel`."""

    reduction: Literal["fast", "exact"] = "fast"  # exact: each microbatch is a slice of its own
    # Slices of a batch; None: the rows of the first call with a row for each rank, at most 8.
    microbatches: int | None = None
    batch_norm: Literal["global", "local"] = "global"
    whole: bool = True  # whether a rank can compute a whole batch
    strict: bool = False  # whether a whole call is an error


class Next(Enum):
    """Next step of a call that is not computed yet, although its kind is decided."""

    BY_KIND = auto()
    DIVIDED = auto()


class FirstCalls:
    """Whole calls of one module, and calls of kinds that are not decided.

    Methods that decide on a kind return the result of the call, or `Next`.

    Args:
        view: the view of this process.
        module: the module.
        strategy: computes the inside of calls; it has prepared the module.
        options: options of the calls.

    Attributes:
        options: see above.
        summary: counts of the calls.
        is_exact: whether the reduction is `exact`.
        state: numbers and tensors of the module, which the ranks compare.
    """

    def __init__(
        self, view: View, module: nn.Module, strategy: Strategy, options: CallOptions
    ) -> None:
        self.view = view
        self.strategy = strategy
        self.options = options
        self.is_exact = strategy.is_exact
        self.summary = ModuleSummary(type(module).__name__)
        self.state = ModuleState()
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def _whole(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        module = self.module
        assert module is not None
        arguments, options = with_all_rows((arguments, options))
        self.view.use_equal_kernels()
        # Inside of another call, or in another thread, no word may be sent.
        if self.view.whole_here() is None:
            self._enter(Action.WHOLE_CALL)
        with self.strategy.whole(module):
            return forward(*arguments, **options)

    def _enter(self, action: Action) -> None:
        """Send a word before messages of the strategy: a rank elsewhere would not join in."""
        self.view.use_equal_kernels()
        if self.strategy.exchanges_in_calls:
            self.view.require_same_action(self.view.word(action))

    def _count_whole(self, reason: str, call: Call | None = None) -> None:
        # Without gradients, comparing the facts could cost more than the call.
        if call is not None and torch.is_grad_enabled():
            self.view.in_step.facts_of_call(call.module, self.state, call.leaves)
        self.summary.whole += 1
        self.summary.add_reason(reason)
        self.view.report(self.summary, _WHOLE.format(reason))
        if self.options.strict:
            raise excluded("whole calls", self.summary.module, reason, error=InputError)

    def _decide_whole(self, kind: Kind, reason: str) -> None:
        """Compute further calls of a kind whole, under `exact` those with the same operations."""
        reason = shortened(reason)
        has_operations = kind.is_watched and not kind.is_compiled and kind.watched_reason is None
        if self.is_exact and has_operations:
            # A resumed run has not seen calls with these operations, so others are tried as before.
            kind.refused[kind.last] = reason
        else:
            kind.reason = reason
        kind.division = None
        self.summary.add_reason(reason)
        self.view.report(self.summary, _WHOLE.format(reason))

    def _first_calls(self, kind: Kind, call: Call) -> Any:
        """Compute a call of a kind that is not decided."""
        if kind.last in kind.refused:
            return self._observed(kind, call)
        self.view.in_step.facts_of_call(call.module, self.state, call.leaves)
        if not kind.is_watched:
            return self._watched(kind, call)
        if kind.backward_code is not None and not kind.backward_code.has_run:
            # The watch goes on: what the backward of the first call runs is not known yet.
            self.summary.watched += 1
            return self._whole(call.forward, call.arguments, call.options)
        self._try(kind, call)
        if kind.division is not None:
            return Next.BY_KIND
        self._count_whole(kind.reason or kind.refused[kind.last])
        return self._whole(call.forward, call.arguments, call.options)

    def _observed(self, kind: Kind, call: Call) -> Any:
        """Compute a call whole, as its operations were refused; otherwise decide by them."""
        call.gather()
        before = Snapshot(call.parts, kind.written, self.view.device)
        operations = Operations()
        self._enter(Action.WHOLE_CALL)
        with self.strategy.whole(call.module), operations:
            result = call.eager(*call.arguments, **call.options)
        functions = tuple(operations.functions)
        if functions in kind.refused:
            self._count_whole(kind.refused[functions], call)
            return result
        # The call is computed once more, from the same state.
        before.restore()
        kind.division = kind.known.get(functions)
        if kind.division is None:
            return self._watched(kind, call)
        return Next.BY_KIND

    def _watched(self, kind: Kind, call: Call) -> Any:
        """Compute a call whole, as the script's own, and note its effects."""
        call.gather()
        kind.is_compiled = call.forward is not call.eager or has_compiled_parts(call.parts)
        # All state: what the calls of this kind write is not known yet.
        before = Snapshot(call.parts, None, self.view.device)
        watched = None
        self._enter(Action.WATCH)
        if self.options.whole:
            try:
                watched = self._watch(kind, call, before, call.arguments, call.options, call.rows)
            except Exception:
                # Otherwise ranks without the exception would wait.
                self.view.require_same_action(self.view.word(Action.WATCH_RAISED))
                raise
        words = self.view.word(Action.WATCH, int(watched is not None))
        self.view.require_same_action(words)
        # Too little memory on one rank decides for all.
        if watched is None or not all(word[2] for word in words):
            before.restore()
            return self._first_divided(kind, call, before)
        self.summary.watched += 1
        if kind.watched_reason is not None:
            self._decide_whole(kind, kind.watched_reason)
        elif self.is_exact and not watched.is_first_again:
            # A whole call has other bits, and a resumed run has another first call.
            before.restore()
            return Next.BY_KIND
        return watched.result

    def _watch(
        self,
        kind: Kind,
        call: Call,
        before: Snapshot,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        rows: int,
    ) -> Watched | None:
        """Watch a computation and note its effects; return None if it does not fit into memory."""
        try:
            with self.strategy.whole(call.module), self.view.suspended(), without_compiler(kind):
                watched = watch(
                    call.module, lambda: call.eager(*arguments, **options), arguments, options
                )
                outputs, structure = flatten(watched.result)
        except torch.OutOfMemoryError:
            return None
        if watched.is_first_again:
            return watched
        kind.outputs = structure
        kind.is_watched = True
        kind.last = watched.operations
        kind.written |= before.changes()
        kind.uses_checkpointing |= watched.uses_checkpointing
        kind.backward_code = watched.backward_code
        kind.gradient_bytes = sum(parameter.nbytes for parameter in call.parameters())
        output_bytes = sum(leaf.nbytes for leaf in outputs if isinstance(leaf, torch.Tensor))
        kind.output_bytes_per_row = output_bytes / rows
        kind.watched_reason = watched.reason
        if self.is_exact and not watched.backward_code.has_run:
            # Its first run would belong to a whole call.
            kind.watched_reason = kind.watched_reason or "has a backward that is written in Python"
        return watched

    def _first_divided(self, kind: Kind, call: Call, before: Snapshot) -> Next:
        """Divide the first call, since the whole batch does not fit: try it, watch the own rows.

        Raises:
            InputError: the calls cannot be divided, so there is no way to compute them.
        """
        self._try(kind, call)
        if kind.division is not None:
            own = call.own_leaves(
                self.strategy.ranks, self.strategy.reduction, kind.division.inputs
            )
            # One slice shows the operations of all.
            arguments, options = tree_unflatten(own[0], call.spec)
            start, stop = call.slices.own_bounds[0]
            watched = self._watch(kind, call, before, arguments, options, stop - start)
            before.restore()
            if watched is None:
                kind.watched_reason = "the own rows do not fit into memory either"
            elif watched.is_first_again:
                kind.watched_reason = "creates parameters"
            kind.reason = kind.watched_reason
        if kind.reason is not None or kind.division is None:
            names = (self.summary.module, kind.reason)
            raise excluded("calls that cannot be divided", *names, error=InputError)
        return Next.DIVIDED

    def _try(self, kind: Kind, call: Call) -> None:
        """Decide by a trial whether calls of a kind can be divided."""
        division: Division | None = None
        reason = ""
        call.gather()
        self._enter(Action.TRIAL)
        try:
            if kind.backward_code is not None:  # otherwise no whole call was watched
                kind.backward_code.require_unchanged()
            with self.strategy.complete(call.module), self.view.suspended(), without_compiler(kind):
                division = try_division(
                    call.module,
                    call.arguments,
                    call.options,
                    forward=call.eager,
                    divided=self.strategy.forward_of_trial(call.eager),
                    rows=call.rows,
                    has_rows=tuple(has_rows(leaf, call.rows) for leaf in call.leaves),
                )
        except ComputedWhole as decision:
            reason = str(decision)
        except Exception as error:  # boundary: a right script must not end because of a trial
            reason = failure("fails in the trial", error)
        # Freed: the code refers to values of the script.
        kind.backward_code = None
        words = self.view.word(Action.TRIAL, int(division is not None))
        self.view.require_same_action(words)
        # Memory, for example, can be short on some ranks only.
        if any(word[2] != words[0][2] for word in words):
            division = None
            reason = "the trial differs between ranks"
        if division is None:
            return self._decide_whole(kind, reason)
        if kind.uses_checkpointing and self.is_exact and division.sums:
            # A recomputation is one of a slice alone.
            return self._decide_whole(kind, "computes activations again, with sums over all rows")
        kind.division = division

    def _computed_again(self, kind: Kind, call: Call, reason: str) -> Any:
        """Compute a call whole that ranks could not divide, for a reason that is equal on all."""
        # Under `exact` surprises are not counted: a resumed run has not seen the calls before.
        kind.surprises += not self.is_exact
        if kind.surprises > _MOST_SURPRISES:
            self._decide_whole(kind, f"{reason}, in {kind.surprises} calls")
        elif reason == OTHER_OPERATIONS and not call.is_tried_again:
            call.is_tried_again = True
            kind.division = None  # tried again, under `fast` with the next call
            kind.exchanges = None  # other operations may have other sums
            if kind.refused:
                return self._observed(kind, call)
            return self._watched(kind, call)
        self._count_whole(reason)
        return self._whole(call.forward, call.arguments, call.options)
