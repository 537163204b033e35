"""Inner graph of the own rows, for modules that compute activations again in the backward.

Activation checkpointing runs the module's code during the backward. It must then find the same
region, rules and parameters as in the forward, so the graph of the own rows is run by a node of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from samestep.config.exclusions import excluded
from samestep.view.operations import Operations
from samestep.view.region import Region, inside
from samestep.view.strategy import CallParameters, OwnResult


class InnerSlice:
    """Forward and backward of an own slice in a graph of its own, which one node of another runs.

    Args:
        run: runs a function on leaves of the arguments, in the region of the slice.
        forward: the module's own forward.
        own: leaves of the arguments of the slice.
        region: region of the forward.
        parameters: parameters of the call.
        position: place of the slice among the own ones.
    """

    def __init__(
        self,
        run: Callable[[Callable[..., Any], Sequence[Any]], OwnResult],
        forward: Callable[..., Any],
        own: list[Any],
        region: Region,
        parameters: CallParameters,
        position: int,
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

    def compute(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward on leaves, and return the own outputs that are tensors."""
        arguments = list(self._own)
        for place, leaf in zip(self.places, leaves[self._count :], strict=True):
            arguments[place] = leaf
        state = torch.get_rng_state()
        with self.parameters.in_place(leaves[: self._count]):
            self.result = self._run(self.parameters.forward(self._forward), arguments)
        if self._region.positions is not None and self._region.seed is not None:
            # Draws with seeds have moved the script's stream only to mark their places.
            torch.set_rng_state(state)
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
        region = replace(self._region, is_recomputed=True)
        if roots:
            with self.parameters.in_backward(own), inside(region), Operations(region):
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


class _InnerGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: InnerSlice, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = inner.leaves(tensors)
        with torch.enable_grad():  # off in the forward of a function
            outputs = inner.compute(leaves)
        ctx.inner = inner
        ctx.leaves = leaves
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[output for output in outputs if not output.requires_grad])
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise excluded("gradients that are differentiated again")
        if ctx.outputs is None:
            # The error of autograd, which frees and checks saved tensors only.
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
        # Private; torch 2.11 and 2.13.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        collected = ctx.inner.backward(roots, seeds, ctx.leaves, keep_graph=keeps_graph)
        if not keeps_graph:
            ctx.outputs = None  # frees the inner graph
        return (None, *collected)
