"""Inner graph of the own rows, for modules that compute activations again in the backward (checkpointing).

Activation checkpointing runs the module's code during the backward. It must then find the same
region, rules and parameters as in the forward, so the graph of the own rows is run by a node of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from samestep.errors import RunError
from samestep.view.operations import Operations
from samestep.view.recomputation import checkpointing_off
from samestep.view.region import Make, Region, UnknownDraw, inside, stream_state
from samestep.view.snapshot import Snapshot
from samestep.view.strategy import CallParameters


@dataclass
class RecomputedRegion(Region):
    """Region of a recomputation. The numbers of its draws in the call are not known.

    Draws are identified by the state of the script's stream, or, if they are from that stream, by
    their shapes.
    """

    factors: dict[tuple[int, ...], int | None] = field(default_factory=dict)

    def draw(
        self, index: int, shape: Sequence[int], make: Make, device: torch.device
    ) -> torch.Tensor:
        """Return the numbers of a random draw that belong to the own rows, as `Region.draw`."""
        if self.positions is not None:
            position = self.positions.get(stream_state())
            if position is None:
                raise UnknownDraw(
                    "a recomputation draws numbers from another state than the forward"
                )
            return super().draw(position, shape, make, device)
        if tuple(shape) not in self.factors:
            raise UnknownDraw(
                f"a recomputation draws numbers of the shape {tuple(shape)}, the forward did not"
            )
        factor = self.factors[tuple(shape)]
        if factor is None:
            return make(tuple(shape), None)
        numbers = make((factor * self.rows, *shape[1:]), None)
        return numbers[factor * self.start : factor * self.stop]


def recomputed(region: Region, draws: Sequence[tuple[int, ...]]) -> RecomputedRegion:
    """Return the region of recomputations in the backward of a call.

    Args:
        region: region of the forward.
        draws: shapes of the draws of the forward.

    Raises:
        UnknownDraw: two draws of one shape belong to the rows in different ways.
    """
    if region.positions is not None:
        values = {one.name: getattr(region, one.name) for one in fields(region)}
        return RecomputedRegion(**values)
    factors: dict[tuple[int, ...], int | None] = {}
    for shape, factor in zip(draws, region.draw_factors, strict=False):
        if factors.setdefault(shape, factor) != factor:
            raise UnknownDraw("draws of one shape, with and without rows, in a recomputed part")
    again = RecomputedRegion(
        region.rows, region.start, region.stop, region.exchange, region.draw_factors
    )
    again.local_batch_norm = region.local_batch_norm
    again.factors = factors
    return again


class _InnerGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Inner, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = inner.leaves(tensors)
        with torch.enable_grad():
            outputs = inner.run(leaves)
        ctx.save_for_backward(*tensors)
        ctx.inner = inner
        ctx.leaves = leaves
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[output for output in outputs if not output.requires_grad])
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (None, *ctx.inner.differentiable_backward(ctx.saved_tensors, gradients))
        if ctx.outputs is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time. "
                "Specify retain_graph=True if you need to backward through the graph a second time."
            )
        roots = []
        seeds = []
        for output, gradient in zip(ctx.outputs, gradients, strict=True):
            if gradient is not None and output.requires_grad:
                roots.append(output)
                seeds.append(gradient)
        keeps_graph = (
            torch._C._autograd._get_current_graph_task_keep_graph()
        )  # private; torch 2.11 and 2.13
        collected = ctx.inner.backward(roots, seeds, ctx.leaves, keep_graph=keeps_graph)
        if not keeps_graph:
            ctx.outputs = None
        return (None, *collected)


class Inner:
    """Forward of an own slice on leaves of its own.

    Args:
        region: region of the forward.
        compute: receives the leaves and how they become the module's parameters, and returns the
            own outputs.
        parameters: parameters of the call; their leaves come first.
        position: place of the slice among the own ones.
        before: state of the module and of the generators before the call.
        recomputes: the call uses activation checkpointing.

    Attributes:
        draws: shapes of the draws of the forward; set by `compute`.
    """

    def __init__(
        self,
        region: Region,
        compute: Callable[[Sequence[torch.Tensor], CallParameters], list[torch.Tensor]],
        parameters: CallParameters,
        position: int,
        before: Snapshot,
        *,
        recomputes: bool,
    ) -> None:
        self.aliases = parameters.aliases(position)
        self.draws: list[tuple[int, ...]] = []
        self._count = len(self.aliases)
        self._region = region
        self._compute = compute
        self._parameters = parameters
        self._position = position
        self._before = before
        self._recomputes = recomputes

    def leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves of the graph from the aliases and the arguments with gradients."""
        own = self._parameters.leaves(tensors[: self._count])
        return own + [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in tensors[self._count :]
        ]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward."""
        return self._compute(leaves, self._parameters)

    def backward(
        self,
        roots: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        *,
        keep_graph: bool,
    ) -> list[torch.Tensor | None]:
        """Run the backward, in the region of the forward, and return the gradients of the leaves."""
        region = recomputed(self._region, self.draws)
        if roots:
            surroundings = self._parameters.in_backward(leaves[: self._count], self._position)
            with surroundings, inside(region), Operations(region):
                # Not `torch.autograd.backward`: as a function of torch, it would run outside of the
                # mode.
                torch.autograd.graph._engine_run_backward(
                    tuple(roots),
                    tuple(seeds),
                    keep_graph,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        gradients = self._parameters.take_gradients(leaves[: self._count])
        for leaf in leaves[self._count :]:
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    def differentiable_backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return gradients that can be differentiated (`create_graph`).

        The forward runs again on the tensors themselves, and keeps its activations: a recomputation
        in a later backward would not know the region.

        Raises:
            RunError: the forward writes buffers. In the plain loop those of checkpointed parts
                would be written again, and the others not.
        """
        if self._recomputes and self._before.has_buffers:
            raise RunError(
                "create_graph=True through a call with activation checkpointing whose forward writes buffers",
                expected="checkpointed parts without batch norm, or gradients that are not differentiated again",
                fix="leave out checkpointing, or put batch norm into evaluation mode",
                code="E_INCOMPATIBLE",
            )
        with self._before.revisited(), checkpointing_off(), torch.enable_grad():
            outputs = self._compute(tensors, self._parameters.differentiable)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if not pairs:
            return [None] * len(tensors)
        roots, seeds = zip(*pairs, strict=True)
        collected = iter(
            torch.autograd.grad(roots, wanted, seeds, create_graph=True, allow_unused=True)
        )
        return [next(collected) if tensor.requires_grad else None for tensor in tensors]


def inner_graph(inner: Inner, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the own outputs as a function of `tensors`; one node runs its graph."""
    return list(_InnerGraph.apply(inner, *tensors))  # type: ignore[no-untyped-call]
