"""Messages between ranks: words, sums and rows."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from samestep.distributed.world import World
from samestep.errors import RankDesyncError, RunError
from samestep.view.rank_comparison import ONE_DECISION
from samestep.view.region import current_region

_FEW_BYTES = 2**16  # sent to every other rank at once


class Action(IntEnum):
    """What a rank is about to do: the first number of a word.

    Attributes:
        place: where in the script a rank sends the word, for errors.
    """

    place: str

    def __new__(cls, place: str) -> Action:
        """Number the actions in their order."""
        number = len(cls.__members__) + 1
        action = int.__new__(cls, number)
        action._value_ = number
        action.place = place
        return action

    ENTER_CALL = "a divided call"
    SUM_IN_CALL = "a sum inside of a divided call"
    END_CALL = "the end of a divided call"
    WHOLE_CALL = "a call that is computed whole"
    WATCH = "the first call of a kind"
    WATCH_RAISED = "an exception in the first call of a kind"
    TRIAL = "the second call of a kind"
    BACKWARD = "a backward"
    STEP = "a step of an optimizer"
    PARALLEL = "samestep.parallel"
    BATCH = "a batch of a loader"
    AGREE = "a decision of all ranks"
    ROWS = "an operation that needs all rows of a batch or an output"
    END = "the end of the script"


class Ranks:
    """Ranks that divide calls among them, as one of them sees them.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.rank = world.rank
        self.size = world.size
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
        # One message to each rank, where an all-reduce takes several rounds.
        if self._sockets is not None and own.nbytes <= _FEW_BYTES:
            # By default, a sum of 32-bit integers would have 64 bits.
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
        sockets = self._sockets

        def send() -> None:
            if sockets is not None and own.nbytes <= _FEW_BYTES:
                sockets.all_gather(own, every, range(self.size))
            else:
                # As bytes: backends do not send tensors of every dtype.
                sent = own.view(-1).view(torch.uint8)
                received = every.view(-1).view(torch.uint8)
                self._group._allgather_base(received, sent).wait()

        self.world.run_collective(send, name)
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
    """Return contiguous values with their own memory: no conjugate or negative of others."""
    if values._is_zerotensor():  # has no memory
        return values.detach().clone()
    return values.detach().contiguous().resolve_conj().resolve_neg()


class RaisedElsewhere(Exception):
    """An operation on own rows has raised on another rank; all ranks compute it on all rows."""


class RowMessages:
    """Gathers and sums of rows outside of divided calls, with the methods of `Ranks`.

    A word precedes each: a rank that is alone in one is an error, not a hang.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        operation: name of the operation that needs a message.

    Args:
        view: the view of this process, which sends words.
        ranks: the ranks that hold the rows.
    """

    def __init__(self, view: Any, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.operation = ""
        self._view = view
        self._ranks = ranks
        self._process = os.getpid()

    def gather_rows(
        self, own: Sequence[torch.Tensor], bounds: Sequence[tuple[int, int]], factor: int
    ) -> torch.Tensor:
        """Return the rows of all ranks in order, as a new tensor."""
        # Without rows, since ranks may have different numbers of them.
        self._word("gather", own[0][:0])
        return self._ranks.gather_rows(own, bounds, factor)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a part of each rank, as a new tensor."""
        (part,) = parts
        self._word("sum", part)
        return self._ranks.sum(part)

    def _word(self, kind: str, part: torch.Tensor) -> None:
        """Require that all ranks are at the same message.

        Args:
            kind: kind of message.
            part: tensor whose shape and dtype are equal on all ranks.

        Raises:
            RaisedElsewhere: another rank gathers for the operation that sums here.
            RankDesyncError: the ranks do something else.
        """
        self._require_here()
        facts = zlib.crc32(f"{kind} {tuple(part.shape)} {part.dtype}".encode())
        operation = zlib.crc32(self.operation.encode())
        for is_last in (False, True):
            words: list[list[int]] = self._view.word(Action.ROWS, operation, facts)
            self._view.require_same_action(words)
            other = next((rank for rank, word in enumerate(words) if word[2:] != words[0][2:]), 0)
            if not other:
                return
            # Private; autograd does not compute an operation again.
            is_backward = torch._C._current_graph_task_id() != -1
            if is_last or is_backward or any(word[2] != operation for word in words):
                raise RankDesyncError(
                    f"ranks 0 and {other} gather or sum different rows of a batch; "
                    f"this rank is at {self.operation!r}",
                    expected="the same operations on batches and outputs of models on every rank",
                    fix=ONE_DECISION,
                    code="E_RANK_DESYNC",
                )
            if kind == "sum":
                raise RaisedElsewhere
            # The ranks with a sum gather too, with their next word.

    def _require_here(self) -> None:
        """Require a place in the program where all ranks send messages in one order.

        Raises:
            RunError: this is another thread or process, or the inside of a divided call.
        """
        place = None
        # Private; a backward may have threads of its own.
        in_backward = torch._C._current_graph_task_id() != -1
        if os.getpid() != self._process:
            place = "in a process that this rank has started"
        elif current_region() is not None:
            place = "inside of a divided call that captures them"
        elif threading.current_thread() is not threading.main_thread() and not in_backward:
            place = "in another thread than the main one"
        if place is not None:
            raise RunError(
                f"{self.operation or 'an operation'} needs rows of a batch "
                f"that other ranks hold, {place}",
                expected="such operations in the main thread, "
                "where all ranks do the same in the same order",
                fix="call tensor.numpy() or the operation in the main thread before; "
                "the tensor is whole from then on",
                code="E_RUN",
            )
