"""Calls of a module divided between ranks: the way of each call from its arguments to its result.

Decisions: docs/decisions/global-view.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from samestep.distributed.devices import is_accelerator
from samestep.distributed.kernels import use_deterministic_kernels
from samestep.view.call_slices import CallSlices, rows_of_batch
from samestep.view.divided import DividedCall
from samestep.view.first_calls import CallOptions, FirstCalls, Next
from samestep.view.kinds import Kind, KindsOfModule, submodules
from samestep.view.strategy import Call, Strategy
from samestep.view.trial_result import Division
from samestep.view.view import View
from samestep.view.worth_dividing import is_worth_dividing


class ParallelModule(FirstCalls):
    """State of `samestep.parallel` for one module.

    Args:
        view: the view of this process.
        module: the module; its class calls `call`.
        strategy: computes the inside of calls; it has prepared the module.
        options: options of the calls.
    """

    def __init__(
        self, view: View, module: nn.Module, strategy: Strategy, options: CallOptions
    ) -> None:
        super().__init__(view, module, strategy, options)
        view.add(self.summary, strategy)
        self._slices = CallSlices(strategy, options.microbatches)
        self._kinds = KindsOfModule(view.kinds, view.device.type, options.batch_norm)

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
        reason = self.view.whole_here()
        if reason is not None:
            if reason:  # a call of the script itself
                self._count_whole(reason)
            return self._whole(forward, arguments, options)
        leaves, spec = tree_flatten((arguments, options))
        rows = rows_of_batch(leaves)
        self.summary.rows = rows
        slices = self._slices.of_rows(rows)
        if slices is None:
            number = "microbatches" if self.is_exact else "ranks"
            self._count_whole(f"fewer rows than {number}")
            return self._whole(forward, arguments, options)
        module = self.module
        assert module is not None
        parts = submodules(module)
        kind = self._kinds.kind(parts, leaves, spec, rows)
        call = Call(module, parts, forward, eager, arguments, options, leaves, spec, rows, slices)
        return self._call_of_kind(kind, call)

    def _call_of_kind(self, kind: Kind, call: Call) -> Any:
        result: Any = Next.BY_KIND
        while isinstance(result, Next):  # a first call can decide on its kind without a result
            result = self._step(kind, call, result)
        return result

    def _step(self, kind: Kind, call: Call, step: Next) -> Any:
        if step is Next.DIVIDED:
            return self._divided(kind, call)
        if kind.reason is None and kind.division is None:
            return self._first_calls(kind, call)
        reason = self._reason_for_whole(kind, call)
        if reason is not None:
            self._count_whole(reason, call)
            return self._whole(call.forward, call.arguments, call.options)
        return self._divided(kind, call)

    def _reason_for_whole(self, kind: Kind, call: Call) -> str | None:
        """Return why a call of a decided kind is computed whole, or None."""
        division = kind.division
        if division is None:
            return kind.reason
        # The smallest slice of all ranks, since one decision holds for all.
        if call.slices.fewest_rows < division.minimum_rows:
            return "a part of the rows would be a single one"
        state = self._shared_state(kind, division)
        if state is not None:
            return f"{state}, and adds values of all rows"
        if self.strategy.has_stages and call.has_differentiated_arguments():
            return "its arguments need gradients, which only the first stage has"
        # A whole call of a split module would gather its parameters, which takes longer than any
        # message of a divided one.
        if self.options.strict or self.view.divides_small_calls or self.strategy.splits_module:
            return None
        output_bytes = int(kind.output_bytes_per_row * call.rows)
        if not self.is_exact and output_bytes >= self.view.output_limit:  # not moved
            output_bytes = 0
        sums = division.sums
        if self.is_exact:  # one process sends none, and decides alike
            sums = 0
        is_worth = is_worth_dividing(
            operations=division.operations_per_row * call.rows,
            gradient_bytes=kind.gradient_bytes,
            output_bytes=output_bytes,
            sums=sums,
            # Under `exact` the microbatches, so that every number of ranks decides alike.
            parts=len(call.slices.bounds),
            has_gradients=torch.is_grad_enabled() and kind.gradient_bytes > 0,
            is_cpu=not is_accelerator(self.view.device),
        )
        return None if is_worth else "so small that messages would take longer"

    def _shared_state(self, kind: Kind, division: Division) -> str | None:
        """Return which state slices would share that take turns in sums over all rows, or None.

        Each slice has buffers of its own, and no other state.
        """
        takes_turns = self.is_exact or self.strategy.has_stages  # otherwise there is one slice
        if not division.sums or not takes_turns:
            return None
        if any(not isinstance(place, tuple) for place in kind.written):
            return "writes attributes or draws outside of torch"
        if division.draw_factors and not self.is_exact and not is_accelerator(self.view.device):
            return "draws random numbers on CPUs"
        return None

    def _divided(self, kind: Kind, call: Call) -> Any:
        """Compute the own rows and gather the outputs; compute the call whole if ranks disagree."""
        # Not of whole calls, whose code may keep values of a rank, such as times.
        self.view.in_step.facts_of_call(call.module, self.state, call.leaves, self._kinds.settings)
        divided = DividedCall(
            self.view,
            self.strategy,
            kind,
            call,
            local_batch_norm=self.options.batch_norm == "local",
        )
        results = divided.own_results()
        difference = divided.difference(results)  # sends a word, equal on all ranks
        if results is None or difference is not None:
            divided.undo()
            return self._computed_again(kind, call, str(difference))
        self.summary.divided += 1
        if self.summary.divided == 1:
            parts = f"between {self.view.ranks.size} processes"
            if self.is_exact:
                parts = f"into {self._slices.microbatches} microbatches"
            self.view.report(self.summary, f"calls divided {parts}")
        return divided.whole_outputs(results)
