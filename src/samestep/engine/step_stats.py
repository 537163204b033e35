"""Losses, counts, requests, values for logging and buffers of a step, reduced over microbatches in one small vector.

Each rank contributes a float64 vector; if buffers are summed, one per microbatch, in the order of the gradients. Losses
and counts have one element per microbatch, so their sum is the list of all of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from samestep.distributed.devices import value_on_host
from samestep.distributed.world import World, all_gather
from samestep.engine.loss import Loss
from samestep.metrics.counts import rounded_sum
from samestep.reduce.tree import MicrobatchTree, Node


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

    @property
    def is_finite(self) -> bool:
        """Whether the loss of each microbatch and the norm of the gradient are finite."""
        return not self.bad_microbatches and math.isfinite(self.grad_norm)


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


Key = tuple[str, ...]
Scalar = torch.Tensor | float


class ValueRow(NamedTuple):
    """Two numbers of one microbatch, such as a sum and its count."""

    microbatch: int
    key: Key
    first: float
    second: float


class StepValues:
    """Pairs of numbers that the forward of each microbatch adds under keys.

    The vector of statistics has places for the keys that all microbatches had before: the plan. If a microbatch has
    other keys, its rank sets a flag in the vector, and ranks exchange keys and numbers in a message of their own, from
    which the next plan follows.

    Attributes:
        rows: the numbers of all microbatches of the last step, in the order of microbatches; equal on every rank.
    """

    def __init__(self) -> None:
        self.rows: list[ValueRow] = []
        self._plan: tuple[Key, ...] = ()
        self._own: dict[int, dict[Key, tuple[Scalar, Scalar]]] = {}

    def begin_step(self, microbatches: Sequence[int]) -> None:
        """Begin a step with these microbatches of this rank."""
        self.rows, self._own = [], {number: {} for number in microbatches}

    def add(self, microbatch: int, key: Key, first: Scalar, second: Scalar) -> None:
        """Add two scalars of a microbatch, on any device, under a key of its own."""
        self._own.setdefault(microbatch, {})[key] = _double(first), _double(second)

    @property
    def is_planned(self) -> bool:
        """Whether each microbatch of this rank has the keys of the plan."""
        return all(tuple(pairs) == self._plan for pairs in self._own.values())

    def length(self, microbatches: int) -> int:
        """Return the number of elements of the vector of statistics for `microbatches`, the number of all."""
        return 2 * len(self._plan) * microbatches

    def elements(self) -> dict[int, Scalar]:
        """Return the numbers of this rank by their positions in the vector; none if the plan does not fit."""
        if not self._plan or not self.is_planned:
            return {}
        elements: dict[int, Scalar] = {}
        for number, pairs in sorted(self._own.items()):
            numbers = chain.from_iterable(pairs.values())
            elements |= dict(enumerate(numbers, start=2 * len(self._plan) * number))
        return elements

    def read(self, numbers: Sequence[float], filled: Sequence[int], world: World, *, is_planned: bool) -> None:
        """Set `rows`; a collective if the plan does not fit on some rank.

        Args:
            numbers: the elements of the vector.
            filled: the microbatches with samples.
            world: ranks that share the microbatches.
            is_planned: the plan fits on every rank.
        """
        if not is_planned:
            return self._exchange(filled, world)
        count = len(self._plan)
        for number in filled if count else ():
            for index, key in enumerate(self._plan, start=number * count):
                self.rows.append(ValueRow(number, key, *numbers[2 * index : 2 * index + 2]))

    def _exchange(self, filled: Sequence[int], world: World) -> None:
        """Set `rows` and the next plan from the numbers and keys of all ranks; a collective."""
        gathered = chain.from_iterable(all_gather(self._own_rows(), world))
        self.rows = sorted(
            (ValueRow(number, tuple(key), first, second) for number, key, first, second in gathered),
            key=lambda row: row.microbatch,
        )
        keys = {tuple(row.key for row in self.rows if row.microbatch == number) for number in filled}
        self._plan = keys.pop() if len(keys) == 1 else ()

    def _own_rows(self) -> list[ValueRow]:
        keys = [(number, key) for number, pairs in self._own.items() for key in pairs]
        scalars = [value for pairs in self._own.values() for pair in pairs.values() for value in pair]
        tensors = [torch.as_tensor(value, dtype=torch.float64) for value in scalars]
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        numbers = torch.stack([tensor.to(device) for tensor in tensors]).tolist() if tensors else []
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return [ValueRow(*key, *pair) for key, pair in zip(keys, pairs, strict=True)]


def scalar(value: Scalar) -> Scalar:
    """Return a scalar as a number, without its graph; as a tensor if the host would wait for its device."""
    if not isinstance(value, torch.Tensor):
        return value
    on_host = value_on_host(value.detach())
    return value.detach().view(()) if on_host is None else on_host


def _double(value: Scalar) -> Scalar:
    """Return a scalar as `scalar` does, as float64: the numbers of one vector have one type."""
    number = scalar(value)
    return number.double() if isinstance(number, torch.Tensor) else number


def means(rows: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Return the mean by name from names, sums and counts, in the order of names; NaN without a count."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for name, total, count in rows:
        by_name.setdefault(name, []).append((total, count))
    result = {}
    for name in sorted(by_name):
        total, count = (rounded_sum(list(column)) for column in zip(*by_name[name], strict=True))
        result[name] = total / count if count else math.nan
    return result
