"""Gradients of weights that several stages use (tied embeddings), added in the order of one process.

In one process, autograd adds the gradients of all uses of a weight in each microbatch, the last use first. Here the
last stage that uses the weight sends its sum to the stage before that uses it, whose backward adds its own uses to it,
and so on. The first of these stages has the gradient of the microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from samestep.distributed.world import World
from samestep.strategies.reduction import flatten, unflatten


@dataclass
class Edge:
    """Gradients that one stage sends to an earlier one, once per microbatch.

    Attributes:
        source: the later stage.
        target: the earlier stage.
        modules: weights as the model has them.
        locals: the same weights as the optimizer has them.
        group: the ranks of both stages; None if both are on one rank.
    """

    source: int
    target: int
    modules: list[nn.Parameter]
    locals: list[nn.Parameter]
    group: dist.ProcessGroup | None
    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by slot, if both stages are on one rank


class SharedWeights:
    """Weights that several stages of a pipeline use.

    Args:
        stages: stages in which each weight receives a gradient, in order, by name.
        modules: weights of this rank as the model has them, by name.
        locals: the same weights as the optimizer has them, by name.
        pipeline: ranks of the pipeline; stage s is on rank s modulo their number.
        world: all ranks.
    """

    def __init__(
        self,
        stages: Mapping[str, Sequence[int]],
        modules: Mapping[str, nn.Parameter],
        locals: Mapping[str, nn.Parameter],  # the term of the project
        pipeline: World,
        world: World,
    ) -> None:
        self._pipeline = pipeline
        names: dict[tuple[int, int, str], list[str]] = {}
        for name, used in stages.items():
            if name in locals:
                for target, source in pairwise(used):
                    names.setdefault((source, target, str(locals[name].dtype)), []).append(name)
        self._edges = []
        for (source, target, _), of_edge in sorted(names.items()):
            ranks = source % pipeline.size, target % pipeline.size
            group = pipeline_group(world, ranks) if ranks[0] != ranks[1] else None
            if pipeline.rank in ranks:
                weights = [modules[name] for name in of_edge], [locals[name] for name in of_edge]
                self._edges.append(Edge(source, target, *weights, group))
        self._parts: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def sends(self, stage: int) -> bool:
        """Return whether a stage of this rank sends gradients to an earlier one."""
        return any(edge.source == stage for edge in self._edges)

    def attach(self, stage: int, slot: int, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of a stage, such that the backward begins with the gradients from later stages."""
        edges = self._edges_to(stage)
        differentiable = [
            i for i, output in enumerate(outputs) if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if not edges or not differentiable:
            return outputs
        weights = [weight for edge in edges for weight in edge.modules]
        first = differentiable[0]
        attached = _LaterUses.apply(  # type: ignore[no-untyped-call]
            outputs[first], self._parts, (stage, slot), *weights
        )
        return [*outputs[:first], attached, *outputs[first + 1 :]]

    def receive(self, stage: int, slot: int) -> None:
        """Receive the gradients from later stages before the backward of a microbatch."""
        parts: list[torch.Tensor | None] = []
        for edge in self._edges_to(stage):
            if edge.group is None:
                tensors = edge.kept.pop(slot)
            else:
                flat = edge.locals[0].new_empty(sum(weight.numel() for weight in edge.locals))
                receive = partial(dist.recv, flat, group=edge.group, group_src=self._peer(edge))
                self._pipeline.run_collective(receive, "gradients of a shared weight")
                tensors = unflatten(flat, edge.locals)
            parts += [_like(weight, tensor) for weight, tensor in zip(edge.modules, tensors, strict=True)]
        if parts:
            self._parts[stage, slot] = parts

    def send(self, stage: int, slot: int) -> None:
        """Send the gradients of a stage to earlier stages that use the same weights."""
        self._sending = [(work, flat) for work, flat in self._sending if not work.is_completed()]
        for edge in (edge for edge in self._edges if edge.source == stage):
            tensors = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in edge.locals]
            for weight in edge.locals:
                weight.grad = None
            if edge.group is None:
                edge.kept[slot] = tensors
                continue
            flat = flatten(tensors, edge.locals)
            work = dist.isend(flat, group=edge.group, group_dst=self._peer(edge))
            assert work is not None
            self._sending.append((work, flat))

    def finish(self) -> None:
        """Wait until all gradients are sent."""
        for work, _ in self._sending:
            self._pipeline.run_collective(work.wait, "gradients of a shared weight")
        self.clear()

    def clear(self) -> None:
        """Drop the gradients of an unfinished step."""
        self._parts, self._sending = {}, []
        for edge in self._edges:
            edge.kept = {}

    def _edges_to(self, stage: int) -> list[Edge]:
        return [edge for edge in self._edges if edge.target == stage]

    @staticmethod
    def _peer(edge: Edge) -> int:
        """Return the other rank of the group of an edge."""
        return 1 - dist.get_rank(edge.group)


def pipeline_group(world: World, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a group of some ranks of each pipeline, and return the one with this rank; a collective of all ranks."""
    assert world.mesh is not None
    axis = (world.mesh.mesh_dim_names or ()).index("pipeline")
    pipelines = world.mesh.mesh.movedim(axis, -1).reshape(-1, world.mesh.mesh.shape[axis])
    own = None
    # torch's local synchronization requires that ranks have created equally many groups.
    for row in pipelines[:, sorted(ranks)].tolist():
        group = dist.new_group(row, timeout=world.timeout)
        own = group if world.rank in row else own
    assert own is None or isinstance(own, dist.ProcessGroup)
    return own


def _like(weight: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a local part in the form of a weight of the model."""
    if not isinstance(weight, DTensor):
        return part
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


class _LaterUses(torch.autograd.Function):
    """Identity; its backward is the first of the stage, and adds the gradients of later uses to those of weights."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, parts: dict[Any, Any], key: tuple[int, int], *weights: Any) -> Any:
        ctx.parts, ctx.key, ctx.weights = parts, key, len(weights)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # No parts: the first half of a backward in two halves, which computes the gradients of inputs alone.
        parts = ctx.parts.pop(ctx.key, [None] * ctx.weights)
        return gradients[0], None, None, *parts
