"""Numbers of microbatches, such as values for logging, which ranks exchange with the statistics of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from samestep.distributed.devices import value_on_host
from samestep.distributed.world import World, all_gather
from samestep.metrics.counts import rounded_sum

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
        if is_planned:
            count = len(self._plan)
            for number in filled if count else ():
                for index, key in enumerate(self._plan, start=number * count):
                    self.rows.append(ValueRow(number, key, *numbers[2 * index : 2 * index + 2]))
            return
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
