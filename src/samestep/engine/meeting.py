"""Where all shards of a global batch meet, on whatever rank they are: one row of numbers each, seen by all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from samestep.errors import InputError
from samestep.parallel.tree import ShardTree
from samestep.runtime.world import World

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_CLOSED = 1  # 0 is a shard without samples
_HEAD = 2


@dataclass(frozen=True)
class Message:
    """What one shard brings.

    Attributes:
        layer: the number of the norm layer that it is at.
        direction: whether it computes the layer's forward or its backward.
        count: values a channel that it has.
        values: sums over them, a float64 vector.
        combine: from counts `(V, 1)` and values `(V, n)` of all shards to what every shard gets; the same function
            for all of them.
    """

    layer: int
    direction: Direction
    count: int
    values: torch.Tensor
    combine: Callable[[torch.Tensor, torch.Tensor], Any]

    @property
    def code(self) -> int:
        return _CLOSED + 1 + 2 * self.layer + _DIRECTIONS.index(self.direction)


class Members:
    """The ranks that have samples in a batch, as process groups; last batches may leave ranks without any."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def group(self, tree: ShardTree) -> dist.ProcessGroup | None:
        """The group of the ranks with samples in `tree`; None means all. Every rank asks, with samples or without."""
        size = self._world.size
        if tree.is_shared_by_all(size):
            return None
        ranks = tuple(rank for rank in range(size) if tree.cover(rank, size))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), timeout=self._world.timeout)
        return self._groups[ranks]


class Meetings:
    """The meetings of one step, as one rank takes part in them.

    Every meeting is one all-reduce of as many numbers as the widest layer needs: where shards of different ranks are
    at different layers, the backend would otherwise add what does not belong together, or wait for ever.

    Attributes:
        bad: the shards whose numbers were not finite at the first meeting where any were not.
        bad_direction: in which pass that was; None if it never was.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None,
        tree: ShardTree,
        shards: Sequence[int],
        layers: Sequence[str],
        width: int,
    ) -> None:
        self._world, self._group, self._tree = world, group, tree
        self._shards, self._layers, self._width = shards, layers, width
        self.bad: list[int] = []
        self.bad_direction: Direction | None = None

    def __call__(self, said: Sequence[Message | None]) -> Any:
        """What comes of one meeting.

        Args:
            said: what this rank's shards bring, in order; None from those that are done.

        Raises:
            InputError: not all shards, of all ranks, are at the same place of the same layer.
            PeerLostError: another rank went away.
        """
        rows = torch.zeros(self._tree.shards, _HEAD + self._width, dtype=torch.float64, device=self._world.device)
        for shard, message in zip(self._shards, said, strict=True):
            rows[shard, 0] = _CLOSED if message is None else message.code
            if message is not None:
                rows[shard, 1] = message.count
                # Added, not copied: a rank that receives it gets 0.0 for -0.0 too.
                rows[shard, _HEAD : _HEAD + len(message.values)] += message.values
        if self._world.size > 1 and (self._group is None or self._group.size() > 1):
            self._world.guarded(lambda: dist.all_reduce(rows, group=self._group), "an all-reduce of batch statistics")
        self._look_at(rows)
        first = said[0]
        if first is None:
            return None
        return first.combine(rows[:, 1:_HEAD], rows[:, _HEAD : _HEAD + len(first.values)])

    def _look_at(self, rows: torch.Tensor) -> None:
        # One look for two questions: on a GPU each look waits for it.
        odd = (~torch.isfinite(rows)).any(dim=1)
        looked = torch.stack([rows[:, 0], odd.double()]).tolist()
        filled = [shard for shard in range(len(rows)) if self._tree.has_samples((shard, shard + 1))]
        codes = {shard: int(looked[0][shard]) for shard in filled}
        if len(set(codes.values())) > 1:
            raise self._apart(codes)
        if self.bad_direction is None and any(looked[1]):
            self.bad = [shard for shard in filled if looked[1][shard]]
            self.bad_direction = _DIRECTIONS[codes[filled[0]] % 2]

    def _apart(self, codes: dict[int, int]) -> InputError:
        """The error for shards that are at different layers."""
        one = next(iter(codes))
        other = next(shard for shard in codes if codes[shard] != codes[one])
        return InputError(
            f"shard {one} {self._where(codes[one])} while shard {other} {self._where(codes[other])}",
            rule="batch_norm: sync needs every shard to call the same norm layers in the same order",
            do="let no condition on the data decide which norm layers run, or set batch_norm: shard",
        )

    def _where(self, code: int) -> str:
        if code == _CLOSED:
            return "is done"
        layer, direction = divmod(code - _CLOSED - 1, 2)
        return f"is at the {_DIRECTIONS[direction]} of the norm layer {self._layers[layer]!r}"
