"""Exchange of batch norm statistics between the microbatches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from samestep.distributed.devices import is_accelerator
from samestep.distributed.local_sockets import LocalSockets
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.microbatches import owned_microbatches, rank_count
from samestep.strategies.reduction import MicrobatchTree

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_DONE = 1  # 0 is a microbatch without samples
_HEADER = 3  # code, count, and exchanges before a reading


@dataclass(frozen=True)
class Message:
    """Contribution of one microbatch.

    `combine` is the same function in all messages of an exchange: from counts `(V, 1)` and values `(V, n)` of all
    microbatches to the result for every microbatch.
    """

    layer: int  # number of the norm layer
    direction: Direction
    count: int  # values per channel
    values: torch.Tensor  # sums over these values, float64, one-dimensional
    combine: Callable[[torch.Tensor, torch.Tensor], Any]

    @property
    def code(self) -> int:
        """Layer and direction as one number."""
        return _DONE + 1 + 2 * self.layer + _DIRECTIONS.index(self.direction)


# Writes the tensors of all ranks with samples to the rows of the second argument, in the order of ranks.
AllGather = Callable[[torch.Tensor, torch.Tensor], None]


class AllGathers:
    """All-gathers of batch statistics; creation is a collective of all ranks."""

    def __init__(self, world: World) -> None:
        self._world, self._sockets = world, world.connect()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def between_ranks_of(self, tree: MicrobatchTree) -> AllGather | None:
        """Return the all-gather of the ranks with samples in `tree`, None if there is one such rank; a collective."""
        ranks = tuple(rank for rank, cover in enumerate(tree.covers(self._world.shares)) if cover)
        if len(ranks) == 1:
            return None
        if self._sockets is not None:
            return partial(self._by_sockets, self._sockets, ranks)
        if ranks not in self._groups:
            # On CPUs, a thread reduces gradients at the same time, so that messages need a group of their own. The
            # collectives of an accelerator are issued by one thread, and all ranks issue them in the same order.
            is_default = len(ranks) == self._world.size and is_accelerator(self._world.device)
            self._groups[ranks] = None if is_default else dist.new_group(list(ranks), timeout=self._world.timeout)
        return partial(self._by_backend, self._groups[ranks])

    def _by_sockets(self, sockets: LocalSockets, ranks: Sequence[int], own: torch.Tensor, rows: torch.Tensor) -> None:
        with self._world.context.status.waiting("an all-gather of batch statistics"):
            sockets.all_gather(own, rows, ranks)

    def _by_backend(self, group: dist.ProcessGroup | None, own: torch.Tensor, rows: torch.Tensor) -> None:
        gather = partial(dist.all_gather, list(rows), own, group=group)
        self._world.run_collective(gather, "an all-gather of batch statistics")


class Exchanging(Protocol):
    """Computation of one microbatch, as a norm layer uses it."""

    def exchange(self, message: Any) -> Any:
        """Contribute `message` to an exchange of all microbatches, and return its result."""


class StatisticsExchange:
    """The exchanges of one step on one rank.

    Each exchange is one all-gather with as many elements as the widest layer needs: if microbatches of different ranks
    were at different layers, the backend would otherwise fail or wait forever.

    The host reads codes, counts and flags together at the end of a step, so that it does not wait for the device at
    every layer. Until then a rank relies on the plan: the codes of its last complete step. At a code that is not in the
    plan, it reads at once. If the codes of ranks differ, it takes part in exchanges until the others read, too.

    Args:
        world: all ranks.
        all_gather: between the ranks with samples; None if this rank alone has samples.
        tree: the microbatches.
        microbatches: those of this rank.
        layers: names of the norm layers.
        width: number of values of the widest message.
        plan: `codes` of the last complete step of this rank; empty if there is none.

    Attributes:
        codes: codes of the exchanges of this rank.
        bad: microbatches with non-finite values in the first exchange that had any.
        bad_direction: direction of that exchange; None if all values were finite.
        has_other_ranks: several ranks have samples.
    """

    def __init__(
        self,
        world: World,
        all_gather: AllGather | None,
        tree: MicrobatchTree,
        microbatches: Sequence[int],
        layers: Sequence[str],
        width: int,
        plan: Sequence[int] = (),
    ) -> None:
        self._world, self._all_gather, self._tree = world, all_gather, tree
        self.has_other_ranks = all_gather is not None
        self._microbatches, self._layers, self._width = microbatches, layers, width
        self._plan, self._follows_plan = plan, True
        owned = (owned_microbatches(tree.microbatches, world.shares, rank) for rank in range(rank_count(world.shares)))
        by_rank = [[number for number in numbers if tree.has_samples((number, number + 1))] for numbers in owned]
        self._by_rank = [numbers for numbers in by_rank if numbers]  # microbatches of each rank with samples
        self._most = max(map(len, self._by_rank))
        self._has_all_rows = len(self._by_rank) * self._most == sum(map(len, self._by_rank)) == tree.microbatches
        self._unread: list[torch.Tensor] = []  # codes, counts, exchanges before a reading, and flags
        self.codes: list[int] = []
        self.bad: list[int] = []
        self.bad_direction: Direction | None = None

    def __call__(self, messages: Sequence[Message | None]) -> Any:
        """Return the combined result of one exchange of `messages`, one per microbatch of this rank; None if finished.

        Raises:
            InputError: the microbatches of all ranks are not at the same layer, or a layer receives one value.
            PeerLostError: another rank ended.
        """
        codes = [_DONE if message is None else message.code for message in messages]
        position, code = len(self.codes), codes[0]
        self.codes.append(code)
        is_planned = self._plan[position : position + 1] == [code] and len(set(codes)) == 1
        self._follows_plan = self._follows_plan and is_planned
        rows = self._gather(codes, messages, self._exchanges_before_reading())
        if self._is_reading(code) or not self._follows_plan:
            self._check()
        first = messages[0]
        if first is None:
            return None
        return first.combine(rows[:, 1:2], rows[:, _HEADER : _HEADER + len(first.values)])

    def _gather(self, codes: Sequence[int], messages: Sequence[Message | None], remaining: int) -> torch.Tensor:
        """Return the rows of all microbatches; zeros for those without samples."""
        own = torch.zeros(self._most, _HEADER + self._width, dtype=torch.float64, device=self._world.device)
        counts = [0 if message is None else message.count for message in messages]
        header = [[code, count, remaining] for code, count in zip(codes, counts, strict=True)]
        own[: len(header), :_HEADER].copy_(torch.tensor(header), non_blocking=True)
        for row, message in zip(own, messages, strict=False):
            if message is not None:
                row[_HEADER : _HEADER + len(message.values)] += message.values  # added: -0.0 becomes 0.0
        gathered = own.new_empty(len(self._by_rank), *own.shape)
        if self._all_gather is None:
            gathered[0].copy_(own)
        else:
            self._all_gather(own, gathered)
        rows = self._by_microbatch(gathered)
        non_finite = (~torch.isfinite(rows)).any(dim=1)
        self._unread.append(torch.cat([rows[:, :_HEADER].T, non_finite.double().unsqueeze(0)]))
        return rows

    def _by_microbatch(self, gathered: torch.Tensor) -> torch.Tensor:
        if self._has_all_rows:
            return gathered.flatten(0, 1)
        rows = gathered.new_zeros(self._tree.microbatches, gathered.shape[-1])
        for rank, numbers in enumerate(self._by_rank):
            for row, number in enumerate(numbers):
                rows[number].copy_(gathered[rank, row])
        return rows

    def end_of_forward(self, compute: Callable[..., Any]) -> Message:
        """Return the message with which a microbatch receives the result of `compute` after all forwards."""
        values = torch.empty(0, dtype=torch.float64, device=self._world.device)
        return Message(len(self._layers), "forward", 0, values, compute)

    def _is_reading(self, code: int) -> bool:
        """Whether every rank reads at this code: at the end of a step, and before other collectives."""
        return code == _DONE or (code - _DONE - 1) // 2 == len(self._layers)

    def _exchanges_before_reading(self) -> int:
        """Return the number of further exchanges of this rank until it reads."""
        rest = self._plan[len(self.codes) - 1 :] if self._follows_plan else []
        return next((number for number, code in enumerate(rest) if self._is_reading(code)), 0)

    def _check(self) -> None:
        unread, self._unread = torch.stack(self._unread), []
        with self._world.context.status.waiting("batch statistics"):
            exchanges = unread.tolist()
        remaining = int(max(exchanges[-1][2]))
        filled = [number for number in range(self._tree.microbatches) if self._tree.has_samples((number, number + 1))]
        for codes_row, counts, _, flags in exchanges:
            codes = {microbatch: int(codes_row[microbatch]) for microbatch in filled}
            error = self._error(codes, sum(counts))
            if error is not None:
                for _ in range(remaining):  # the ranks that have not read yet expect them
                    self._gather([_DONE] * len(self._microbatches), [None] * len(self._microbatches), 0)
                raise error
            if self.bad_direction is None and any(flags):
                self.bad = [microbatch for microbatch in filled if flags[microbatch]]
                self.bad_direction = _DIRECTIONS[codes[filled[0]] % 2]

    def _error(self, codes: dict[int, int], count: float) -> InputError | None:
        """Return the error of an exchange, from the code of each microbatch and the number of values per channel."""
        one, code = next(iter(codes.items()))
        other = next((microbatch for microbatch in codes if codes[microbatch] != code), None)
        if other is not None:
            return InputError(
                f"microbatch {one} {self._location(code)} while microbatch {other} {self._location(codes[other])}",
                expected="under batch_norm: sync every microbatch calls the same norm layers in the same order",
                fix="make the order of norm layers independent of the data, or set batch_norm: microbatch",
                code="E_NORM_LAYER",
            )
        layer, direction = divmod(code - _DONE - 1, 2)
        if self._is_reading(code) or direction or count > 1:
            return None
        return InputError(
            f"the norm layer {self._layers[layer]!r} receives one value per channel from the whole global batch",
            expected="batch statistics need at least two values per channel",
            fix="set a larger batch_size, or one that leaves no single sample for the last batch",
            code="E_NORM_LAYER",
        )

    def _location(self, code: int) -> str:
        if code == _DONE:
            return "is done"
        layer, direction = divmod(code - _DONE - 1, 2)
        if layer == len(self._layers):
            return "is at the end of its forward"
        return f"is at the {_DIRECTIONS[direction]} of the norm layer {self._layers[layer]!r}"
