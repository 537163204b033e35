"""Norm layers that meet, without an engine around them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from samestep.engine.lockstep import Track, run_in_lockstep
from samestep.engine.meeting import Meetings
from samestep.engine.norm import join_layers, norm_layers
from samestep.engine.replica import replicate
from samestep.parallel.tree import ShardTree
from samestep.runtime.threads import Threads

CPU = torch.device("cpu")
ONE_RANK: Any = SimpleNamespace(size=1, rank=0, device=CPU)


class Shards:
    """What became of the shards of one batch.

    Attributes:
        outputs: of each shard.
        slopes: the gradient of each shard's inputs.
        replicas: of each shard, with the gradients of its parameters.
        meetings: those that took place.
    """

    def __init__(self, model: nn.Module, parts: list[torch.Tensor], slopes: list[torch.Tensor] | None = None) -> None:
        """Forward of `parts` by `model` in lockstep, and backward from `slopes` if there are any."""
        self.outputs: dict[int, torch.Tensor] = {}
        self.slopes: dict[int, torch.Tensor | None] = {}
        self.replicas = {number: replicate(model) for number in range(len(parts))}
        layers = norm_layers(model)
        self.meetings = Meetings(
            ONE_RANK,
            None,
            ShardTree(len(parts), len(parts)),
            range(len(parts)),
            list(layers),
            2 * max(layer.num_features for layer in layers.values()),
        )

        def task(track: Track, number: int) -> None:
            module = self.replicas[number].module
            join_layers(module, track)
            inputs = parts[number].clone().requires_grad_(parts[number].is_floating_point())
            outputs = module(inputs)
            self.outputs[number] = outputs.detach()
            if slopes is not None:
                outputs.backward(slopes[number])
                self.slopes[number] = inputs.grad

        threads = Threads("test")
        try:
            tasks = [lambda track, number=number: task(track, number) for number in range(len(parts))]
            run_in_lockstep(tasks, self.meetings, CPU, threads)
        finally:
            threads.end()

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """The sum over shards of each parameter's gradient."""
        return [
            sum((replica.parameters[parameter].grad for replica in self.replicas.values()), torch.zeros_like(parameter))
            for parameter in model.parameters()
        ]
