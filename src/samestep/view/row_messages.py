"""Messages about rows of a batch. Each begins with a word: a rank that is alone in one is an error, not a hang."""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import RankDesyncError, RunError
from samestep.view.ranks import Ranks
from samestep.view.region import current_region

if TYPE_CHECKING:
    from samestep.view.view import View

# First number of a word.
ROWS = 11  # it gathers or sums rows
ROWS_RAISED = 12  # an operation on its own rows raised an exception
_MOST_NUMBERS = 2  # that fit into a word


class RaisedElsewhere(Exception):
    """An operation on the own rows of another rank has raised an exception; all ranks compute it whole."""


class RowMessages:
    """Gathers and sums of rows outside of divided calls, with the methods of `samestep.view.ranks.Ranks`.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        operation: name of the operation that needs a message.

    Args:
        view: the view of this process.
        ranks: the ranks that hold the rows.
    """

    def __init__(self, view: View, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.operation = ""
        self._view = view
        self._ranks = ranks
        self._process = os.getpid()

    def gather_rows(self, own: Sequence[torch.Tensor], bounds: Sequence[tuple[int, int]], factor: int) -> torch.Tensor:
        """Return the rows of all ranks in order, as a new tensor."""
        self._word(ROWS, "gather", own[0].shape[1:], own[0].dtype)
        return self._ranks.gather_rows(own, bounds, factor)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a part of each rank, as a new tensor."""
        (part,) = parts
        is_few = part.numel() <= _MOST_NUMBERS and part.device.type == "cpu" and not part.is_complex()
        if is_few and self._ranks is self._view.ranks:
            totals = [sum(column) for column in zip(*self._numbers(part.detach().reshape(-1)), strict=True)]
            return torch.tensor(totals, dtype=part.dtype).view(part.shape)
        self._word(ROWS, "sum", part.shape, part.dtype)
        return self._ranks.sum(part)

    def _numbers(self, values: torch.Tensor) -> list[list[Any]]:
        """Return a few numbers of each rank, in order. They travel in the word.

        Args:
            values: at most two numbers in one dimension.
        """
        own: list[Any] = values.tolist()
        if not values.is_floating_point():
            return [word[4 : 4 + len(own)] for word in self._word(ROWS, "numbers", values.shape, values.dtype, own)]
        bits = struct.unpack(f"<{len(own)}q", struct.pack(f"<{len(own)}d", *own))
        words = self._word(ROWS, "numbers", values.shape, values.dtype, bits)
        every = [struct.pack(f"<{len(own)}q", *word[4 : 4 + len(own)]) for word in words]
        return [list(struct.unpack(f"<{len(own)}d", packed)) for packed in every]

    def require_raised_on_all(self) -> None:
        """Report an exception of an operation on the own rows.

        Raises:
            RankDesyncError: another rank does something else than this operation.
        """
        self._word(ROWS_RAISED, "", (), None)

    def _word(
        self, action: int, kind: str, shape: Sequence[int], dtype: torch.dtype | None, numbers: Sequence[int] = ()
    ) -> list[list[int]]:
        self._require_here()
        operation = zlib.crc32(self.operation.encode())
        facts = zlib.crc32(f"{kind} {tuple(shape)} {dtype}".encode())
        words = self._view.word(action, operation, facts, *numbers)
        actions = {word[0] for word in words}
        is_same_operation = len({tuple(word[1:3]) for word in words}) == 1
        if ROWS_RAISED in actions and actions <= {ROWS, ROWS_RAISED} and is_same_operation:
            if action == ROWS:
                raise RaisedElsewhere
            return words
        self._view.require_same_action(words)
        for rank, word in enumerate(words):
            if word[2:4] != words[0][2:4]:
                raise RankDesyncError(
                    f"ranks 0 and {rank} gather or sum different rows of a batch; this rank is at {self.operation!r}",
                    expected="the same operations on batches and outputs of models on every rank",
                    fix="decide on all ranks by the same values: samestep.all_gather gives every rank those of all",
                    code="E_RANK_DESYNC",
                )
        return words

    def _require_here(self) -> None:
        """Require a place in the program where all ranks send messages in one order.

        Raises:
            RunError: this is another thread or process, or the inside of a divided call.
        """
        place = None
        in_backward = torch._C._current_graph_task_id() != -1  # private; it may have threads of its own
        if os.getpid() != self._process:
            place = "in a process that this rank has started"
        elif current_region() is not None:
            place = "inside of a divided call that captures them"
        elif threading.current_thread() is not threading.main_thread() and not in_backward:
            place = "in another thread than the main one"
        if place is not None:
            raise RunError(
                f"{self.operation or 'an operation'} needs rows of a batch that other ranks hold, {place}",
                expected="such operations in the main thread, where all ranks do the same in the same order",
                fix="call tensor.numpy() or the operation in the main thread before; the tensor is whole from then on",
                code="E_RUN",
            )
