"""Messages of divided calls between ranks: words, sums and gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.microbatches import Shares, microbatch_bounds, owned_microbatches, rank_count

MOST_MICROBATCHES = 8  # without a number
_FEW_BYTES = 2**16  # sent to every other rank at once


class Ranks:
    """Ranks that divide calls among them, as one of them sees them.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.size = world.size
        self.shares = world.shares
        self.world = world
        self._group = world.process_group
        self._sockets = world.sockets

    def words(self, word: Sequence[int]) -> list[list[int]]:
        """Return the 64-bit integers of all ranks, equally many of each, by rank."""
        if self.size == 1:
            return [list(word)]
        # On the host: reading a word from a GPU would wait for the work that is queued there.
        own = torch.tensor(word, dtype=torch.int64)
        every: list[list[int]] = self._gather_equal(own, "a word of each rank").tolist()
        return every

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` over ranks, as a new contiguous tensor."""
        own = _in_memory(values)
        if self._sockets is not None and own.nbytes <= _FEW_BYTES:
            return self._gather_equal(own, "a sum").sum(0, dtype=own.dtype)
        total = own.clone()
        self.world.run_collective(lambda: self._group.allreduce([total]).wait(), "a sum")
        return total

    def start_sum(self, values: torch.Tensor) -> Any:
        """Start to sum `values` over ranks in place, and return the work to wait for."""
        return self._group.allreduce([values])

    def wait(self, work: Any) -> None:
        """Wait for a sum of gradients."""
        self.world.run_collective(work.wait, "the sum of gradients")

    def _gather_equal(self, own: torch.Tensor, name: str) -> torch.Tensor:
        """Return equally large tensors of all ranks, as rows of a new tensor."""
        every = own.new_empty(self.size, *own.shape)
        if self._sockets is not None and own.nbytes <= _FEW_BYTES:
            sockets = self._sockets
            self.world.run_collective(
                lambda: sockets.all_gather(own, every, range(self.size)), name
            )
        else:
            # As bytes: backends do not send tensors of every dtype.
            sent = own.view(-1).view(torch.uint8)
            received = every.view(-1).view(torch.uint8)
            self.world.run_collective(
                lambda: self._group._allgather_base(received, sent).wait(), name
            )
        return every

    def gather_rows(
        self, own: Sequence[torch.Tensor], bounds: Sequence[tuple[int, int]], factor: int
    ) -> torch.Tensor:
        """Return the rows of all ranks in order, as a new contiguous tensor.

        Args:
            own: consecutive own rows.
            bounds: first row and row after the last of each rank, in rows of the batch.
            factor: rows of the tensor per row of the batch.
        """
        counts = [(stop - start) * factor for start, stop in bounds]
        largest = max(counts)
        parts = [_in_memory(part) for part in own]
        sent = parts[0]
        # Messages have equal sizes: ranks with fewer rows send rows without a meaning.
        missing = largest - counts[self.rank]
        if missing or len(parts) > 1:
            sent = torch.cat([*parts, sent.new_zeros(missing, *sent.shape[1:])])
        every = self._gather_equal(sent, "rows of the outputs")
        if min(counts) == largest:
            return every.view(-1, *sent.shape[1:])
        return torch.cat([rows[:count] for rows, count in zip(every, counts, strict=True)])


def _in_memory(values: torch.Tensor) -> torch.Tensor:
    """Return the values as a contiguous tensor with their own memory: not the conjugates or negatives of them."""
    if values._is_zerotensor():  # has no memory
        return values.detach().clone()
    return values.detach().contiguous().resolve_conj().resolve_neg()


class Slices:
    """Slices of a batch, each of which is computed alone; a rank owns consecutive ones.

    Attributes:
        bounds: first row and row after the last of each slice.
        own: numbers of the own slices.
        by_rank: first row and row after the last of each rank.

    Args:
        bounds: the slices, at least one for each rank.
        shares: number of ranks, or their shares of the slices.
        rank: this rank.
        copies: whether tensors of slices have memory of their own, whose alignment decides on
            kernels.
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], shares: Shares, rank: int, *, copies: bool = False
    ) -> None:
        self.bounds = bounds
        self.copies = copies
        self.own = owned_microbatches(len(bounds), shares, rank)
        self.by_rank = bounds
        if rank_count(shares) < len(bounds):
            self.by_rank = _by_rank(bounds, shares)

    @property
    def own_bounds(self) -> Sequence[tuple[int, int]]:
        """First row and row after the last of each own slice."""
        return self.bounds[self.own.start : self.own.stop]

    @property
    def fewest_rows(self) -> int:
        """Number of rows of the smallest slice."""
        return min(stop - start for start, stop in self.bounds)


def _by_rank(bounds: Sequence[tuple[int, int]], shares: Shares) -> list[tuple[int, int]]:
    owned = [owned_microbatches(len(bounds), shares, rank) for rank in range(rank_count(shares))]
    return [
        (bounds[numbers[0]][0], bounds[numbers[-1]][1]) if numbers else (0, 0) for numbers in owned
    ]


def rank_bounds(rows: int, microbatches: int, shares: Shares) -> list[tuple[int, int]]:
    """Return the own rows of each rank, `[start, stop)`: those of its microbatches.

    Args:
        rows: rows of the batch.
        microbatches: its slices.
        shares: number of ranks, or their shares of the slices.
    """
    return _by_rank(microbatch_bounds(rows, microbatches), shares)


def require_microbatches(microbatches: int | None, size: int) -> None:
    """Require a microbatch for each rank.

    Raises:
        InputError: there are more ranks.
    """
    number = MOST_MICROBATCHES if microbatches is None else microbatches
    if number < size:
        raise InputError(
            f"{size} ranks divide the calls of a module into {number} microbatches",
            expected="at least one microbatch for each rank",
            fix=f"{number} processes; or samestep.parallel(model, microbatches={size}) on every number of processes",
            code="E_TOO_MANY_RANKS",
        )
