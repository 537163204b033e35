"""Outputs of a divided call: whole values from those of own slices, and gradients of own slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from samestep.microbatches import Slices
from samestep.view.crossings import RowBounds, cut, enter, replicated
from samestep.view.rows_tensor import Rows, is_large
from samestep.view.strategy import CallParameters, Strategy
from samestep.view.trial_result import Output
from samestep.view.view import View


class OutputCrossing:
    """End of a divided call, without its arguments: a graph keeps it as long as the loss lives.

    Args:
        view: the view of this process.
        strategy: strategy of the module.
        slices: slices of the batch.
        outputs: the outputs that are tensors.
        tensors: their values in the first own slice, and then in the others.
        parameters: parameters of the call.

    Attributes:
        has_sums: whether the backward has sums inside of the call, as of batch norm.
    """

    def __init__(
        self,
        view: View,
        strategy: Strategy,
        slices: Slices,
        outputs: Sequence[Output],
        tensors: Sequence[torch.Tensor],
        parameters: CallParameters | None,
    ) -> None:
        self.view = view
        self.outputs = outputs
        self.parameters = parameters
        self.has_sums = False
        self._reduction = strategy.reduction
        self._ranks = strategy.ranks
        self._slices = slices
        self._shares = [(stop - start) / slices.rows for start, stop in slices.own_bounds]
        self.tensors = len(outputs) * len(self._shares)
        # The bounds of outputs that are so large that their rows stay where they are.
        messages = RowBounds(view.row_messages(strategy.ranks), slices)
        self.stays: list[RowBounds | None] = []
        for tensor, output in zip(tensors, outputs, strict=False):
            bounds = messages.times(output.factor)
            is_kept = output.kind == "rows" and is_large(tensor, bounds, view.output_limit)
            kept = bounds if is_kept else None
            self.stays.append(kept)

    def whole(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole outputs, with a graph if the own ones have one."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            anchors: Sequence[torch.Tensor] = ()
            if self.parameters is not None:
                anchors = self.parameters.anchors
            whole = list(_GatherOutputs.apply(self, *tensors, *anchors))  # type: ignore[no-untyped-call]
        else:
            whole = self.gather(tensors)
        for number, bounds in enumerate(self.stays):
            if bounds is not None:
                whole[number] = Rows(whole[number], bounds)
        return whole

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the value of each whole output, or of its own rows, without a graph."""
        whole = []
        for number, output in enumerate(self.outputs):
            parts = tensors[number :: len(self.outputs)]
            if self.stays[number] is not None or output.kind == "constant":
                whole.append(parts[0].detach())
            elif output.kind == "rows":
                whole.append(self._rows(output).gather(parts))
            else:
                # In float64: the sum of rounded parts would be less exact than the whole loss.
                weights = self._weights(output)
                weighted = [
                    part.detach().double() * weight
                    for part, weight in zip(parts, weights, strict=True)
                ]
                whole.append(self._reduction.sum(weighted).to(parts[0].dtype))
        return whole

    def _rows(self, output: Output) -> RowBounds:
        return RowBounds(self._ranks, self._slices, output.factor)

    def _weights(self, output: Output) -> list[float]:
        """Return the factors of the parts of an output that has no rows."""
        if output.kind == "sum":
            return [1.0] * len(self._shares)
        return self._shares

    def shown(self, gradient: torch.Tensor | None, number: int) -> torch.Tensor | None:
        """Return the gradient of an output as one of all rows."""
        if gradient is None or self.stays[number] is None:
            return gradient
        return Rows(gradient, self._rows(self.outputs[number]))

    def own_gradients(self, gradient: torch.Tensor, number: int) -> list[torch.Tensor]:
        """Return the gradients of an output of each own slice from the whole. Differentiable."""
        output = self.outputs[number]
        if self.stays[number] is not None:
            return [gradient]  # already that of the own rows
        if output.kind == "rows":
            return cut(gradient, self._rows(output))
        entered = [gradient] * len(self._shares)
        if gradient.requires_grad and torch.is_grad_enabled():
            entered = enter(gradient, self._reduction, len(self._shares))
        return [own * weight for own, weight in zip(entered, self._weights(output), strict=True)]


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: OutputCrossing, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = crossing.tensors
        ctx.crossing = crossing
        ctx.anchors = [tensor.device for tensor in tensors[count:]]
        ctx.set_materialize_grads(False)
        whole = crossing.gather(tensors[:count])
        pairs = zip(whole, tensors, strict=False)
        ctx.mark_non_differentiable(*[value for value, own in pairs if not own.requires_grad])
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        crossing: OutputCrossing = ctx.crossing
        whole = [None if one is None else replicated(one) for one in gradients]
        shown = [crossing.shown(one, number) for number, one in enumerate(whole)]
        crossing.view.in_step.facts_of_backward(shown)
        if crossing.has_sums:
            crossing.view.begin_backward()
        if crossing.parameters is not None:
            crossing.parameters.begin_backward()
        count = len(crossing.outputs)
        own: list[torch.Tensor | None] = [None] * crossing.tensors
        for number, gradient in enumerate(whole):
            if gradient is not None:
                own[number::count] = crossing.own_gradients(gradient, number)
        # Without a gradient for its anchor, a bucket that no own row uses would not be summed on
        # this rank.
        zeros = {device: torch.zeros((), device=device) for device in set(ctx.anchors)}
        return (None, *own, *[zeros[device] for device in ctx.anchors])
