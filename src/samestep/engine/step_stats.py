"""Losses, counts, requests and buffers of a step, reduced over microbatches in one small vector.

Each rank contributes a float64 vector; if buffers are summed, one per microbatch, in the order of the gradients. Losses
and counts have one element per microbatch, so their sum is the list of all of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from samestep.distributed.devices import value_on_host
from samestep.distributed.world import World
from samestep.engine.loss import Loss
from samestep.metrics.counts import rounded_sum
from samestep.strategies.reduction import MicrobatchTree, Node


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the global batch, before the update.
        count: divisor of the summed loss: samples, or tokens.
        lr: learning rate of the first parameter group in this step.
        grad_norm: global 2-norm of the gradient, before clipping.
        skipped: the update was skipped because of a non-finite loss or gradient.
        stop: a rank received a stop request; leave the loop after this step.
        save: a rank requested a checkpoint of the state after this step (`Engine.step(save=True)`).
        values: values for logging that the forward function returned, as means over the global batch.
    """

    step: int
    loss: float
    count: float
    lr: float
    grad_norm: float
    skipped: bool
    stop: bool
    save: bool
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepStats:
    """Reduced statistics of a step."""

    losses: list[float]  # summed loss of each microbatch; 0 for a microbatch without samples
    counts: list[float]  # of each microbatch
    stop: bool  # a rank received a stop request
    save: bool  # a rank requested a checkpoint
    hashes: tuple[float, float]  # sums of the hash of the step, and of its square
    buffers: torch.Tensor  # sum over microbatches of the buffers' values, float64
    control: Sequence[float] = ()  # the first elements of `buffers`
    grad_norm: float = 0.0
    values: Sequence[float] = ()

    @classmethod
    def from_vector(
        cls,
        microbatches: int,
        total: torch.Tensor,
        control_length: int = 0,
        norm: torch.Tensor | None = None,
        values: Sequence[torch.Tensor] = (),
    ) -> StepStats:
        """Return the statistics from the sum of the vectors of all microbatches, and other scalars of the step.

        Everything is read at once: the only time in a step that the host waits for the device.
        """
        length = vector_length(microbatches, 0)
        vector = total[: length + control_length]
        scalars = [scalar.detach() for scalar in (*values, *([] if norm is None else [norm]))]
        on_host = [number for scalar in scalars if (number := value_on_host(scalar)) is not None]
        if len(on_host) == len(scalars):
            numbers = [*vector.tolist(), *on_host]
        else:
            columns = [scalar.double().view(1).to(total.device, non_blocking=True) for scalar in scalars]
            numbers = torch.cat([vector, *columns]).tolist()
        grad_norm = 0.0 if norm is None else numbers.pop()
        *head, stop, save, hashes, squares = numbers[:length]
        control, others = numbers[length : length + control_length], numbers[length + control_length :]
        buffers = total[length:]
        losses, counts = head[:microbatches], head[microbatches:]
        return cls(losses, counts, stop > 0, save > 0, (hashes, squares), buffers, control, grad_norm, others)

    @property
    def count(self) -> float:
        """Global count: the divisor of the summed loss and gradient."""
        return math.fsum(self.counts)

    @property
    def loss(self) -> float:
        """Mean loss."""
        return rounded_sum(self.losses) / self.count if self.count else 0.0

    @property
    def bad_microbatches(self) -> list[int]:
        """Microbatches with a non-finite loss."""
        return [microbatch for microbatch, loss in enumerate(self.losses) if not math.isfinite(loss)]


def vector_length(microbatches: int, buffers: int) -> int:
    """Return the length of a microbatch's vector with `buffers` buffer elements."""
    return 2 * microbatches + 4 + buffers


class LocalStats:
    """Losses, counts and buffers of the microbatches of this rank in one step."""

    def __init__(self) -> None:
        self._losses: dict[int, torch.Tensor | float] = {}
        self._counts: dict[int, torch.Tensor | float] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def add(self, microbatch: int, loss: Loss, buffers: torch.Tensor | None) -> None:
        """Add a microbatch; `buffers` is its float64 vector, None for zeros."""
        self._losses[microbatch] = _scalar(loss.sum)
        self._counts[microbatch] = _scalar(loss.count)
        if buffers is not None:
            self._buffers[microbatch] = buffers

    def vectors(
        self,
        tree: MicrobatchTree,
        cover: Sequence[Node],
        device: torch.device,
        buffers: int = 0,
        *,
        in_order: bool = False,
        requests: tuple[bool, bool] = (False, False),
        step_hash: int = 0,
    ) -> dict[Node, torch.Tensor]:
        """Return this rank's vectors by subtree, without a wait for the device.

        Args:
            tree: the microbatches of the global batch.
            cover: the subtrees of this rank.
            device: device of the vectors.
            buffers: number of buffer elements.
            in_order: buffers are summed in tree order, so each microbatch has a vector; otherwise, sums have no
                rounding, and one vector holds those of all microbatches of this rank.
            requests: requests of this rank to stop, and to save.
            step_hash: that of the collective check.
        """
        nodes = [(number, number + 1) for number in self._losses] if in_order else cover
        length = vector_length(tree.microbatches, 0)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        first = self._numbers(tree.microbatches, (*requests, step_hash, step_hash**2), device)
        first = torch.cat([first, zeros(buffers)]) if buffers else first
        vectors = {node: zeros(length + buffers) if order else first for order, node in enumerate(nodes)}
        for number, values in self._buffers.items():
            vectors[(number, number + 1) if in_order else nodes[0]][length:].add_(values.to(device, non_blocking=True))
        return vectors

    def _numbers(self, microbatches: int, numbers: Sequence[float], device: torch.device) -> torch.Tensor:
        """Return losses and counts of all microbatches of this rank, and numbers of the rank, as a vector."""
        host = array("d", bytes(16 * microbatches))
        columns: dict[int, list[torch.Tensor]] = {}  # consecutive elements, by the first
        for values, start in ((self._losses, 0), (self._counts, microbatches)):
            first = following = -1
            for number, value in values.items():
                if not isinstance(value, torch.Tensor):
                    host[start + number] = value
                    continue
                # A microbatch without samples has neither loss nor count.
                first = first if number == following else start + number
                columns.setdefault(first, []).append(value)
                following = number + 1
        host.extend(numbers)
        # A copy of all numbers of the host at once needs no wait for a device.
        vector = torch.frombuffer(host, dtype=torch.float64).to(device, non_blocking=True)
        for first, tensors in columns.items():
            column = [tensor.to(device, non_blocking=True) for tensor in tensors]
            stacked = torch.stack(column) if len(column) > 1 else column[0]
            vector[first : first + len(column)].copy_(stacked, non_blocking=True)
        return vector


def _scalar(value: torch.Tensor | float) -> torch.Tensor | float:
    """Return a scalar as a number, without its graph; as a tensor if the host would wait for its device."""
    if not isinstance(value, torch.Tensor):
        return value
    on_host = value_on_host(value.detach())
    return value.detach().view(()) if on_host is None else on_host


def counts_of(microbatches: int, total: torch.Tensor) -> torch.Tensor:
    """Return the counts of all microbatches from the sum of their vectors."""
    return total[microbatches : 2 * microbatches]


def reduce_requests(microbatches: int, total: torch.Tensor, world: World) -> None:
    """Add the requests of all ranks, if several ranks compute the same microbatches; a collective."""
    requests = total[2 * microbatches : 2 * microbatches + 2].contiguous()
    world.all_reduce(requests)
    total[2 * microbatches : 2 * microbatches + 2] = requests
