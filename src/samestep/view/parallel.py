"""Calls of a module divided between ranks: the way of each call from its arguments to its result.

Decisions: docs/decisions/global-view.md
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.distributed.devices import is_accelerator, use_deterministic_kernels
from samestep.errors import InputError
from samestep.microbatches import microbatch_bounds, owned_microbatches
from samestep.view.crossings import CallExchange, RowBounds
from samestep.view.divided import (
    OTHER_OPERATIONS,
    DividedCall,
    OwnResult,
    difference_between_ranks,
    own_arguments,
)
from samestep.view.division import ComputedWhole, Division, failure, is_worth_dividing, shortened
from samestep.view.kinds import Kind, KindsOfModule, has_compiled_parts, submodules
from samestep.view.leaves import flatten
from samestep.view.operations import Operations, has_rules
from samestep.view.ranks import MOST_MICROBATCHES, Action, Slices, rank_bounds, require_microbatches
from samestep.view.region import Region
from samestep.view.rows import with_all_rows
from samestep.view.snapshot import Snapshot
from samestep.view.strategy import Call, Strategy
from samestep.view.trial import try_division
from samestep.view.view import ModuleSummary, View
from samestep.view.watch import Watched, watch

_MOST_SURPRISES = 8  # calls of a kind that were divided and had to be computed again whole


class ParallelModule:
    """State of `samestep.parallel` for one module.

    Args:
        view: the view of this process.
        module: the module; its class calls `call`.
        strategy: computes the inside of calls; it has prepared the module.
        microbatches: slices of a batch; None for the rows of the first call with a row for each
            rank, at most 8.
        batch_norm: statistics of the whole batch, or of the own rows.
        reduction: `fast`, or `exact`: each microbatch is a slice of its own.
        whole: whether a rank can compute a whole batch.
        strict: whether a whole call is an error.
    """

    def __init__(
        self,
        view: View,
        module: nn.Module,
        strategy: Strategy,
        *,
        microbatches: int | None,
        batch_norm: Literal["global", "local"],
        reduction: Literal["fast", "exact"],
        whole: bool,
        strict: bool,
    ) -> None:
        self.view = view
        self.strategy = strategy
        self.options: dict[str, Any] = {
            "microbatches": microbatches,
            "batch_norm": batch_norm,
            "reduction": reduction,
            "whole": whole,
            "strict": strict,
        }
        self.summary = ModuleSummary(type(module).__name__)
        view.add(self)
        self._module = weakref.ref(module)
        self._microbatches = microbatches
        self._batch_norm = batch_norm
        self.is_exact = reduction == "exact"
        self._has_reduction = not (
            self.is_exact or strategy.has_stages
        )  # which needs the number of microbatches
        self._can_be_whole = whole
        self._is_strict = strict
        self._kinds = KindsOfModule(view.kinds, view.device.type, batch_norm)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def call(
        self,
        forward: Callable[..., Any],
        eager: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Compute a call of the module, divided if it can be.

        Args:
            forward: forward of the module's own class, bound to the module; compiled if the script
                compiles the module.
            eager: the same without a compiler.
            arguments: positional arguments.
            options: keyword arguments.
        """
        arguments, options = self.strategy.arguments((arguments, options))
        if self.is_exact and use_deterministic_kernels():  # the script has set something else
            self.view.report(
                self.summary, "kernels stay deterministic, and are not selected by their time"
            )
        if not self.view.divides_here():
            if (reason := self.view.whole_here()) is not None:
                self._count_whole(reason)
            return self._whole(forward, arguments, options)
        module = self.module
        assert module is not None
        leaves, spec = tree_flatten((arguments, options))
        rows = next(
            (leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0),
            0,
        )
        self.summary.rows = rows
        slices = self._slices(rows)
        if slices is None:
            self._count_whole(
                "fewer rows than microbatches" if self.is_exact else "fewer rows than ranks"
            )
            return self._whole(forward, arguments, options)
        call = Call(
            module,
            submodules(module),
            forward,
            eager,
            arguments,
            options,
            leaves,
            spec,
            rows,
            slices,
        )
        return self._call_of_kind(self._kinds.kind(call.parts, leaves, spec, rows), call)

    def _call_of_kind(self, kind: Kind, call: Call) -> Any:
        if kind.reason is None and not kind.is_watched:
            self.view.in_step.facts_of_call(call.module, call.leaves)
            return self._watched(kind, call)
        if kind.reason is None and kind.division is None and kind.last in kind.refused:
            return self._observed(kind, call)
        if kind.reason is None and kind.division is None:
            if (
                kind.backward_code is not None and not kind.backward_code.has_run
            ):  # the watch goes on
                self.view.in_step.facts_of_call(call.module, call.leaves)
                self.summary.watched += 1
                return self._whole(call.forward, call.arguments, call.options)
            self._try(kind, call)
        reason = self._reason_for_whole(kind, call)
        if kind.division is None or reason is not None:
            self._count_whole(str(reason), call)
            return self._whole(call.forward, call.arguments, call.options)
        return self._divided(kind, kind.division, call)

    def _reason_for_whole(self, kind: Kind, call: Call) -> str | None:
        if kind.division is None:
            return kind.reason or kind.refused[kind.last]
        if call.slices.fewest_rows < kind.division.minimum_rows:
            return "a part of the rows would be a single one"
        if self.strategy.has_stages and call.has_differentiated_arguments():
            return "its arguments need gradients, which only the first stage has"
        if not self._is_worth_dividing(kind, kind.division, call):
            return "so small that messages would take longer"
        return None

    def _is_worth_dividing(self, kind: Kind, division: Division, call: Call) -> bool:
        if self._is_strict or self.view.divides_small_calls or self.strategy.splits_module:
            return True
        output_bytes = int(kind.output_bytes_per_row * call.rows)
        if not self.is_exact and output_bytes >= self.view.output_limit:  # not moved
            output_bytes = 0
        return is_worth_dividing(
            operations=division.operations_per_row * call.rows,
            gradient_bytes=kind.gradient_bytes,
            output_bytes=output_bytes,
            sums=0 if self.is_exact else division.sums,  # one process sends none, and decides alike
            parts=len(call.slices.bounds),
            has_gradients=torch.is_grad_enabled() and kind.gradient_bytes > 0,
            is_cpu=not is_accelerator(self.view.device),
        )

    def _slices(self, rows: int) -> Slices | None:
        """Return the slices of a batch, or None if one would have no row.

        Raises:
            InputError: under `exact`, there are more ranks than microbatches.
        """
        ranks = self.strategy.ranks
        if self.is_exact or self.strategy.has_stages:
            return self._microbatches_of(rows)
        if rows < ranks.size:
            return None
        if self._microbatches is None:
            self._microbatches = min(rows, MOST_MICROBATCHES)
        slices = Slices(rank_bounds(rows, self._microbatches, ranks.shares), ranks.size, ranks.rank)
        return slices if slices.fewest_rows else None

    def _microbatches_of(self, rows: int) -> Slices | None:
        ranks = self.strategy.ranks
        if rows < 2 or rows < (self._microbatches or 0):
            return None
        if self._microbatches is None:
            self._microbatches = min(rows, MOST_MICROBATCHES)
            if (
                not self.is_exact
            ):  # several rows of each: small matrix products take as long as larger ones
                self._microbatches = min(max(rows // 2, ranks.size), MOST_MICROBATCHES)
            require_microbatches(self._microbatches, ranks.size)
        slices = Slices(
            microbatch_bounds(rows, self._microbatches),
            ranks.shares,
            ranks.rank,
            copies=self.is_exact,
        )
        if not self._has_reduction:
            self.strategy.sum_slices(slices, is_exact=self.is_exact)
            self._has_reduction = True
        return slices

    # --- whole calls -----------------------------------------------------------------------------

    def _whole(
        self, forward: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        module = self.module
        assert module is not None
        arguments, options = with_all_rows((arguments, options))
        self.view.equal_kernels.begin()
        if self.view.divides_here():
            self._enter(Action.WHOLE_CALL)
        with self.strategy.whole(module):
            return forward(*arguments, **options)

    def _enter(self, action: Action) -> None:
        """Send a word before the messages of a strategy, as a rank that does something else would not take part."""
        self.view.equal_kernels.begin()
        if self.strategy.exchanges_in_calls:
            self.view.require_same_action(self.view.word(action))

    def _count_whole(self, reason: str, call: Call | None = None) -> None:
        if (
            call is not None and torch.is_grad_enabled()
        ):  # otherwise comparing could cost more than the call
            self.view.in_step.facts_of_call(call.module, call.leaves)
        self.summary.whole += 1
        self.summary.add_reason(reason)
        self.view.report(self.summary, _WHOLE.format(reason))
        if self._is_strict:
            raise InputError(
                f"a call of {self.summary.module} is computed whole: {reason}",
                expected="only divided calls, with strict=True",
                fix="change what the reason names, or leave out strict=True",
                code="E_INCOMPATIBLE",
            )

    def _decide_whole(self, kind: Kind, reason: str) -> None:
        reason = shortened(reason)
        if (
            self.is_exact
            and kind.is_watched
            and not kind.is_compiled
            and kind.watched_reason is None
        ):
            kind.refused[kind.last] = (
                reason  # a resumed run has not seen calls with these operations
            )
        else:
            kind.reason = reason
        kind.division = None
        self.summary.add_reason(reason)
        self.view.report(self.summary, _WHOLE.format(reason))

    def _observed(self, kind: Kind, call: Call) -> Any:
        """Compute a call whole, as its operations were refused; otherwise decide by them."""
        call.gather()
        before = Snapshot(call.parts, kind.written, self.view.device)
        operations = Operations()
        self._enter(Action.WHOLE_CALL)
        with self.strategy.whole(call.module), operations:
            result = call.whole_eager()
        functions = tuple(operations.functions)
        if functions in kind.refused:
            self._count_whole(kind.refused[functions], call)
            return result
        before.restore()
        kind.division = kind.known.get(functions)
        if kind.division is None:
            return self._watched(kind, call)
        return self._call_of_kind(kind, call)

    def _watched(self, kind: Kind, call: Call) -> Any:
        """Compute a call whole, as the script's own, and note its effects."""
        call.gather()
        kind.is_compiled = call.forward is not call.eager or has_compiled_parts(call.parts)
        before = Snapshot(call.parts, None, self.view.device)
        watched = None
        self._enter(Action.WATCH)
        if self._can_be_whole:
            try:
                watched = self._watch(
                    kind, call, before, call.whole_eager, call.arguments, call.options, call.rows
                )
            except Exception:
                self.view.require_same_action(
                    self.view.word(Action.WATCH_RAISED)
                )  # otherwise other ranks would wait
                raise
        words = self.view.word(Action.WATCH, int(watched is not None))
        self.view.require_same_action(words)
        if watched is None or not all(word[2] for word in words):
            before.restore()
            return self._first_divided(kind, call, before)
        self.summary.watched += 1
        if kind.watched_reason is not None:
            self._decide_whole(kind, kind.watched_reason)
        elif self.is_exact and not watched.is_first_again:
            # A whole call has other bits, and a resumed run has another first call.
            before.restore()
            return self._call_of_kind(kind, call)
        return watched.result

    def _watch(
        self,
        kind: Kind,
        call: Call,
        before: Snapshot,
        compute: Callable[[], Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        rows: int,
    ) -> Watched | None:
        """Watch a computation and note its effects; return None if it does not fit into memory."""
        try:
            with self.strategy.whole(call.module), self.view.suspended(), _eager(kind):
                watched = watch(call.module, compute, arguments, options)
                outputs, structure = flatten(watched.result)
        except torch.OutOfMemoryError:
            return None
        if watched.is_first_again:
            return watched
        kind.outputs = structure
        kind.is_watched = True
        kind.last = watched.operations
        kind.written |= before.changes()
        kind.uses_checkpointing = watched.uses_checkpointing
        kind.backward_code = watched.backward_code
        kind.gradient_bytes = sum(parameter.nbytes for parameter in call.parameters())
        kind.output_bytes_per_row = (
            sum(leaf.nbytes for leaf in outputs if isinstance(leaf, torch.Tensor)) / rows
        )
        kind.watched_reason = watched.reason
        if (
            self.is_exact and not watched.backward_code.has_run
        ):  # its first run would belong to a whole call
            kind.watched_reason = kind.watched_reason or "has a backward that is written in Python"
        return watched

    def _first_divided(self, kind: Kind, call: Call, before: Snapshot) -> Any:
        """Divide the first call, since the whole batch does not fit: try it, watch the own rows, compute them again.

        Raises:
            InputError: the calls cannot be divided, so there is no way to compute them.
        """
        self._try(kind, call)
        if kind.division is not None:
            own = own_arguments(self.strategy.ranks, self.strategy.reduction, kind.division, call)
            arguments, options = tree_unflatten(own[0], call.spec)
            start, stop = call.slices.own_bounds[0]
            watched = self._watch(
                kind,
                call,
                before,
                lambda: call.eager(*arguments, **options),
                arguments,
                options,
                stop - start,
            )
            before.restore()
            if watched is None:
                kind.watched_reason = "the own rows do not fit into memory either"
            elif watched.is_first_again:
                kind.watched_reason = "creates parameters"
            kind.reason = kind.watched_reason
        if kind.reason is not None or kind.division is None:
            raise InputError(
                f"calls of {self.summary.module} cannot be divided: {kind.reason}",
                expected="calls that can be divided: the whole batch does not fit into the memory of one device",
                fix="change what the reason names, or use a smaller batch, with whole=True",
                code="E_INCOMPATIBLE",
            )
        return self._divided(kind, kind.division, call)

    def _try(self, kind: Kind, call: Call) -> None:
        """Decide by a trial whether calls of a kind can be divided."""
        division: Division | None = None
        reason = ""
        call.gather()
        self._enter(Action.TRIAL)
        try:
            if kind.backward_code is not None:  # otherwise no whole call was watched
                kind.backward_code.require_unchanged()
            with self.strategy.complete(call.module), self.view.suspended(), _eager(kind):
                division = try_division(
                    call.module,
                    call.arguments,
                    call.options,
                    forward=call.eager,
                    divided=self.strategy.forward_of_trial(call.eager),
                    rows=call.rows,
                    has_rows=call.cut_leaves(),
                )
        except ComputedWhole as decision:
            reason = str(decision)
        except (
            Exception
        ) as error:  # boundary: a script that is right without a trial must not end because of it
            reason = failure("fails in the trial", error)
        kind.backward_code = None
        words = self.view.word(Action.TRIAL, int(division is not None))
        self.view.require_same_action(words)
        if any(word[2] != words[0][2] for word in words):
            division = None
            reason = "the trial differs between ranks"
        if division is None:
            return self._decide_whole(kind, reason)
        if kind.uses_checkpointing:
            division = replace(division, form="inner")
            if self.is_exact and division.sums:  # a recomputation is one of a slice alone
                return self._decide_whole(
                    kind, "computes activations again, with sums over all rows"
                )
        kind.division = division

    # --- divided calls ---------------------------------------------------------------------------

    def _divided(self, kind: Kind, division: Division, call: Call) -> Any:
        """Compute the own rows and gather the outputs; compute the call whole if ranks do not agree."""
        view = self.view
        view.in_step.facts_of_call(call.module, call.leaves)
        seed = view.draw_seed(
            division.draw_factors, is_exact=self.is_exact
        )  # slices begin after it
        snapshot = Snapshot(call.parts, kind.written, view.device)
        exchanges = () if self.is_exact and not division.sums else kind.exchanges
        all_here = partial(self.strategy.all_in_sum, view.all_ranks_in_sum)
        exchange = CallExchange(self.strategy.reduction, exchanges, all_here)
        regions = self._regions(division, call, exchange, seed)
        # Under `exact` not: code that is compiled for one number of rows has other bits than that
        # for several.
        stays_compiled = kind.is_compiled and not self.is_exact and not has_rules(kind.last)
        known = kind.last if stays_compiled else None
        divided = DividedCall(
            *(
                self.strategy.ranks,
                self.strategy.reduction,
                division,
                call,
                regions,
                exchange,
                snapshot,
            ),
            notes_state=self.is_exact,
            known=known,
            output_rows=(
                RowBounds(view.row_messages(self.strategy.ranks), call.slices),
                view.output_limit,
            ),
        )
        if self.strategy.exchanges_in_calls or exchanges is None or exchanges:
            view.require_same_action(view.word(Action.ENTER_CALL))
        call.operations = division.operations
        parameters = self.strategy.parameters(call)
        results: list[OwnResult] | None = None
        try:
            if stays_compiled:
                results = divided.compute(call.forward, parameters)
            else:
                with _eager(kind):
                    results = divided.compute(call.eager, parameters)
            exchange.require_all_sums()
        except (
            Exception
        ):  # boundary: computed whole below, where the script's own exception comes on all ranks
            results = None
            if parameters is None:
                exchange.leave(view.device)
            else:
                parameters.leave(exchange, view.device)
        difference = difference_between_ranks(view, kind, divided, results)
        if difference is None and results is not None:
            exchange.end_forward()
            kind.exchanges = tuple(exchange.sums)
            kind.known[tuple(results[0].operations.functions)] = division
            buffers = sorted(place for place in kind.written if isinstance(place, tuple))
            self.strategy.share_buffers([(call.parts[index], name) for index, name in buffers])
            self.summary.divided += 1
            if self.summary.divided == 1:
                between = f"into {self._microbatches} microbatches" if self.is_exact else ""
                view.report(
                    self.summary,
                    f"calls divided {between or f'between {view.ranks.size} processes'}",
                )
            return divided.whole_outputs(
                results, parameters, partial(self._before_backward, has_sums=bool(exchange.sums))
            )
        divided.undo()
        if parameters is not None:
            parameters.abandon()
        return self._computed_again(
            kind, call, str(difference), is_unknown=difference == OTHER_OPERATIONS
        )

    def _before_backward(self, gradients: Sequence[torch.Tensor | None], *, has_sums: bool) -> None:
        """Note the gradients of the outputs, and send a word before sums inside of the backward, as of batch norm."""
        self.view.in_step.facts_of_backward(gradients)
        if has_sums and not self.strategy.has_stages:
            self.view.begin_backward()

    def _computed_again(self, kind: Kind, call: Call, reason: str, *, is_unknown: bool) -> Any:
        # Under `exact`, a resumed run has not seen the calls before: each call is a decision of its
        # own.
        kind.surprises += not self.is_exact
        if kind.surprises > _MOST_SURPRISES:
            self._decide_whole(kind, f"{reason}, in {kind.surprises} calls")
        elif is_unknown and not call.is_tried_again:
            call.is_tried_again = True
            kind.division = None  # tried again, under `fast` with the next call
            kind.exchanges = None
            if kind.refused:
                return self._observed(kind, call)
            return self._watched(kind, call)
        self._count_whole(reason)
        return self._whole(call.forward, call.arguments, call.options)

    def _regions(
        self, division: Division, call: Call, exchange: CallExchange, seed: int
    ) -> list[Region]:
        """Return the regions of the own slices."""
        regions = []
        for number, (start, stop) in zip(call.slices.own, call.slices.own_bounds, strict=True):
            region = Region(call.rows, start, stop, exchange, division.draw_factors)
            region.local_batch_norm = self._batch_norm == "local"
            if self.is_exact or (self.strategy.has_stages and is_accelerator(self.view.device)):
                region.microbatches = [(number, start, stop)]
            elif is_accelerator(self.view.device):
                assert self._microbatches is not None
                slices = microbatch_bounds(call.rows, self._microbatches)
                owned = owned_microbatches(
                    self._microbatches, self.strategy.ranks.shares, self.strategy.ranks.rank
                )
                region.microbatches = [(own, *slices[own]) for own in owned]
            if region.microbatches:
                if division.form == "inner":
                    region.positions = {}
                region.seed = seed
            regions.append(region)
        return regions


def _eager(kind: Kind) -> AbstractContextManager[Any]:
    """Run compiled parts without the compiler, which hides their operations and random draws."""
    if not kind.is_compiled:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


_WHOLE = "calls computed whole on every process: {}"
