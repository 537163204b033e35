"""Lockstep of norm layers without an engine."""

import torch
from samestep.engine.data_parallel import replicate
from samestep.engine.microbatch_threads import Threads, Track, run_in_lockstep
from samestep.engine.sync_batch_norm import StatisticsExchange, norm_layers, synchronized_layers
from torch import nn

from samestep.distributed.world import World
from samestep.reduce.tree import MicrobatchTree

CPU = torch.device("cpu")
ONE_RANK = World(0, 1, CPU)


class Microbatches:
    """Results of the microbatches of one batch.

    Attributes:
        outputs: outputs by microbatch.
        slopes: gradients of the inputs by microbatch.
        replicas: replicas of the model by microbatch, with the gradients of their parameters.
        exchange: the exchange of statistics.
    """

    def __init__(self, model: nn.Module, parts: list[torch.Tensor], slopes: list[torch.Tensor] | None = None) -> None:
        """Compute the forward of `parts` in lockstep, and the backward from `slopes` if present."""
        self.outputs: dict[int, torch.Tensor] = {}
        self.slopes: dict[int, torch.Tensor | None] = {}
        self.replicas = {number: replicate(model) for number in range(len(parts))}
        layers = norm_layers(model)
        self.exchange = StatisticsExchange(
            ONE_RANK,
            None,
            MicrobatchTree(len(parts), len(parts)),
            range(len(parts)),
            list(layers),
            2 * max(layer.num_features for layer in layers.values()),
        )

        def task(track: Track, number: int) -> None:
            module = self.replicas[number].module
            with synchronized_layers(module, track):
                inputs = parts[number].clone().requires_grad_(parts[number].is_floating_point())
                outputs = module(inputs)
                self.outputs[number] = outputs.detach()
                if slopes is not None:
                    outputs.backward(slopes[number])
                    self.slopes[number] = inputs.grad

        threads = Threads("test")
        try:
            tasks = [lambda track, number=number: task(track, number) for number in range(len(parts))]
            run_in_lockstep(tasks, self.exchange, CPU, threads)
        finally:
            threads.end()

    def gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the gradient of each parameter, summed over microbatches."""
        return [
            sum((replica.parameters[parameter].grad for replica in self.replicas.values()), torch.zeros_like(parameter))
            for parameter in model.parameters()
        ]
