"""Inner graph of the own rows, for modules that compute activations again in the backward.

Activation checkpointing runs the module's code during the backward. It must then find the same
region, rules and parameters as in the forward, so the graph of the own rows is run by a node of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from samestep.config.exclusions import excluded
from samestep.view.operations import Operations
from samestep.view.recomputation import checkpointing_off
from samestep.view.region import Make, Region, UnknownDraw, inside, stream_state
from samestep.view.snapshot import Snapshot
from samestep.view.strategy import CallParameters, OwnResult


@dataclass
class _RecomputedRegion(Region):
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


def _recomputed(region: Region, draws: Sequence[tuple[int, ...]]) -> _RecomputedRegion:
    """Return the region of recomputations in the backward of a call.

    Args:
        region: region of the forward.
        draws: shapes of the draws of the forward.

    Raises:
        UnknownDraw: two draws of one shape belong to the rows in different ways.
    """
    if region.positions is not None:
        values = {one.name: getattr(region, one.name) for one in fields(region)}
        return _RecomputedRegion(**values)
    factors: dict[tuple[int, ...], int | None] = {}
    for shape, factor in zip(draws, region.draw_factors, strict=False):
        if factors.setdefault(shape, factor) != factor:
            raise UnknownDraw("draws of one shape, with and without rows, in a recomputed part")
    again = _RecomputedRegion(
        region.rows, region.start, region.stop, region.exchange, region.draw_factors
    )
    again.local_batch_norm = region.local_batch_norm
    again.factors = factors
    return again


class InnerSlice:
    """Forward and backward of an own slice in a graph of its own, which one node of another runs.

    Args:
        run: runs a function on leaves of the arguments, in the region of the slice.
        forward: the module's own forward.
        own: leaves of the arguments of the slice.
        region: region of the forward.
        parameters: parameters of the call.
        position: place of the slice among the own ones.
        before: state of the module and of the generators before the call.
        recomputes: the call uses activation checkpointing.
    """

    def __init__(
        self,
        run: Callable[[Callable[..., Any], Sequence[Any]], OwnResult],
        forward: Callable[..., Any],
        own: list[Any],
        region: Region,
        parameters: CallParameters,
        position: int,
        before: Snapshot,
        recomputes: bool,
    ) -> None:
        self.aliases = parameters.aliases(position)
        self.parameters = parameters
        self.result: OwnResult | None = None
        tensors = [place for place, leaf in enumerate(own) if isinstance(leaf, torch.Tensor)]
        self.places = [place for place in tensors if own[place].requires_grad]
        self._count = len(self.aliases)
        self._run = run
        self._forward = forward
        self._own = own
        self._region = region
        self._position = position
        self._before = before
        self._recomputes = recomputes
        self._draws: list[tuple[int, ...]] = []  # shapes of the draws of the forward

    def result_in_graph(self) -> OwnResult:
        """Run the forward, with one node in the present graph."""
        tensors = [*self.aliases, *[self._own[place] for place in self.places]]
        outputs = iter(_InnerGraph.apply(self, *tensors))  # type: ignore[no-untyped-call]
        assert self.result is not None
        result = self.result
        self.result = None  # a reference would keep the inner graph
        leaves = list(result.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = next(outputs)
        return OwnResult(leaves, result.spec, result.operations)

    def leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the leaves of the graph from the aliases and the arguments with gradients."""
        own = list(self.parameters.leaves(tensors[: self._count]))
        for tensor in tensors[self._count :]:
            own.append(tensor.detach().requires_grad_(tensor.requires_grad))
        return own

    def compute(
        self, leaves: Sequence[torch.Tensor], parameters: CallParameters
    ) -> list[torch.Tensor]:
        """Run the forward on leaves, and return the own outputs that are tensors."""
        arguments = list(self._own)
        for place, leaf in zip(self.places, leaves[self._count :], strict=True):
            arguments[place] = leaf
        state = torch.get_rng_state()
        with parameters.in_place(leaves[: self._count]):
            self.result = self._run(parameters.forward(self._forward), arguments)
        if self._region.positions is not None:
            torch.set_rng_state(state)
        self._draws = self.result.operations.draws
        return [leaf for leaf in self.result.leaves if isinstance(leaf, torch.Tensor)]

    def backward(
        self,
        roots: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        *,
        keep_graph: bool,
    ) -> list[torch.Tensor | None]:
        """Run the backward in the region of the forward, and return the gradients of the leaves."""
        own = leaves[: self._count]
        region = _recomputed(self._region, self._draws)
        if roots:
            surroundings = self.parameters.in_backward(own, self._position)
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
        gradients = self.parameters.take_gradients(own)
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
            raise excluded("gradients of checkpointed buffers")
        with self._before.revisited(), checkpointing_off(), torch.enable_grad():
            outputs = self.compute(tensors, self.parameters.differentiable)
        self.result = None
        pairs = _with_gradients(outputs, gradients)
        if not pairs:
            return [None] * len(tensors)
        roots, seeds = zip(*pairs, strict=True)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        collected = torch.autograd.grad(roots, wanted, seeds, create_graph=True, allow_unused=True)
        by_tensor = dict(zip(map(id, wanted), collected, strict=True))
        return [by_tensor.get(id(tensor)) for tensor in tensors]


class _InnerGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: InnerSlice, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = inner.leaves(tensors)
        with torch.enable_grad():
            outputs = inner.compute(leaves, inner.parameters)
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
        pairs = _with_gradients(ctx.outputs, gradients)
        roots = [output for output, _ in pairs]
        seeds = [gradient for _, gradient in pairs]
        # Private; torch 2.11 and 2.13.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        collected = ctx.inner.backward(roots, seeds, ctx.leaves, keep_graph=keeps_graph)
        if not keeps_graph:
            ctx.outputs = None
        return (None, *collected)


def _with_gradients(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
