"""Losses, counts, requests and buffers of a step, reduced over microbatches in one small vector.

Each rank contributes a float64 vector; if buffers are summed, one per microbatch, in the order of the gradients. Losses
and counts have one element per microbatch, so their sum is the list of all of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from samestep.distributed.devices import value_on_host
from samestep.distributed.world import World
from samestep.engine.loss import Loss
from samestep.engine.step_values import Scalar, StepValues, scalar
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
    values: Sequence[float] = ()  # the elements of `StepValues`
    are_values_planned: bool = True  # on every rank

    @classmethod
    def from_vector(
        cls,
        microbatches: int,
        total: torch.Tensor,
        control_length: int = 0,
        norm: torch.Tensor | None = None,
        values_length: int = 0,
    ) -> StepStats:
        """Return the statistics from the sum of the vectors of all microbatches, and the norm of the gradient.

        Everything is read at once: the only time in a step that the host waits for the device.
        """
        length = vector_length(microbatches, 0)
        end = length + values_length
        vector, norm = total[: end + control_length], total.new_zeros(()) if norm is None else norm.detach()
        on_host = value_on_host(norm)
        if on_host is not None:
            numbers = [*vector.tolist(), on_host]
        else:
            numbers = torch.cat([vector, norm.double().view(1).to(total.device, non_blocking=True)]).tolist()
        *head, stop, save, unplanned, hashes, squares = numbers[:length]
        values, control, grad_norm = numbers[length:end], numbers[end:-1], numbers[-1]
        losses, counts = head[:microbatches], head[microbatches:]
        flags, sums = (stop > 0, save > 0), (hashes, squares)
        return cls(losses, counts, *flags, sums, total[end:], control, grad_norm, values, unplanned == 0)

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


def vector_length(microbatches: int, others: int) -> int:
    """Return the length of a microbatch's vector with `others` elements of values and buffers."""
    return 2 * microbatches + 5 + others


class LocalStats:
    """Losses, counts and buffers of the microbatches of this rank in one step."""

    def __init__(self) -> None:
        self._losses: dict[int, Scalar] = {}
        self._counts: dict[int, Scalar] = {}
        self._buffers: dict[int, torch.Tensor] = {}

    def add(self, microbatch: int, loss: Loss, buffers: torch.Tensor | None) -> None:
        """Add a microbatch; `buffers` is its float64 vector, None for zeros."""
        self._losses[microbatch] = scalar(loss.sum)
        self._counts[microbatch] = scalar(loss.count)
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
        values: StepValues | None = None,
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
            values: those of the step.
        """
        nodes = [(number, number + 1) for number in self._losses] if in_order else cover
        values = StepValues() if values is None else values
        values_length = values.length(tree.microbatches)
        length = vector_length(tree.microbatches, values_length)
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        header = *requests, not values.is_planned, step_hash, step_hash**2
        first = self._numbers(tree.microbatches, header, values.elements(), values_length, device)
        first = torch.cat([first, zeros(buffers)]) if buffers else first
        vectors = {node: zeros(length + buffers) if order else first for order, node in enumerate(nodes)}
        for number, own in self._buffers.items():
            vectors[(number, number + 1) if in_order else nodes[0]][length:].add_(own.to(device, non_blocking=True))
        return vectors

    def _numbers(
        self,
        microbatches: int,
        numbers: Sequence[float],
        elements: Mapping[int, Scalar],
        length: int,
        device: torch.device,
    ) -> torch.Tensor:
        """Return losses and counts of all microbatches of this rank, numbers of the rank, and `elements`, as a vector.

        `length` is that of the last part, whose `elements` are set.
        """
        host = array("d", bytes(16 * microbatches))
        host.extend(numbers)
        end = len(host)
        host.frombytes(bytes(8 * length))
        columns: dict[int, list[torch.Tensor]] = {}  # consecutive elements, by the first
        for values, start in ((self._losses, 0), (self._counts, microbatches), (elements, end)):
            first = following = -1
            for number, value in values.items():
                if not isinstance(value, torch.Tensor):
                    host[start + number] = value
                    continue
                # A microbatch without samples has neither loss nor count.
                first = first if number == following else start + number
                columns.setdefault(first, []).append(value)
                following = number + 1
        # A copy of all numbers of the host at once needs no wait for a device.
        vector = torch.frombuffer(host, dtype=torch.float64).to(device, non_blocking=True)
        for first, tensors in columns.items():
            column = [tensor.to(device, non_blocking=True) for tensor in tensors]
            stacked = torch.stack(column) if len(column) > 1 else column[0]
            vector[first : first + len(column)].copy_(stacked, non_blocking=True)
        return vector


def counts_of(microbatches: int, total: torch.Tensor) -> torch.Tensor:
    """Return the counts of all microbatches from the sum of their vectors."""
    return total[microbatches : 2 * microbatches]


def reduce_requests(microbatches: int, total: torch.Tensor, world: World) -> None:
    """Add the requests of all ranks, if several ranks compute the same microbatches; a collective."""
    requests = total[2 * microbatches : 2 * microbatches + 2].contiguous()
    world.all_reduce(requests)
    total[2 * microbatches : 2 * microbatches + 2] = requests
