"""Messages about rows of a batch. Each begins with a word: a rank that is alone in one is an error, not a hang."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from samestep.errors import RankDesyncError, RunError
from samestep.view.actions import Action
from samestep.view.ranks import Ranks
from samestep.view.region import current_region

_MOST_NUMBERS = 2  # that fit into a word


class RaisedElsewhere(Exception):
    """An operation on the own rows of another rank has raised an exception; all ranks compute it whole."""


class Words(Protocol):
    """Words of all ranks (`samestep.view.view.View`).

    Attributes:
        ranks: all ranks.
    """

    ranks: Ranks

    def word(self, action: Action, *fields: int) -> list[list[int]]:
        """Send a word to all ranks and return the words of all."""
        ...

    def require_same_action(self, words: Iterable[list[int]]) -> None:
        """Require that all ranks do the same."""
        ...


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

    def __init__(self, view: Words, ranks: Ranks) -> None:
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
        self._word("gather", own[0][:0])
        return self._ranks.gather_rows(own, bounds, factor)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of a part of each rank, as a new tensor. A few numbers travel in the word."""
        (part,) = parts
        is_few = (
            part.numel() <= _MOST_NUMBERS and part.device.type == "cpu" and not part.is_complex()
        )
        if not is_few or self._ranks is not self._view.ranks:
            self._word("sum", part)
            return self._ranks.sum(part)
        wide = part.detach().reshape(-1)
        wide = wide.double() if part.is_floating_point() else wide.long()
        words = self._word("numbers", part, wide.view(torch.int64).tolist())
        every = torch.tensor([word[4 : 4 + len(wide)] for word in words]).view(wide.dtype)
        # No view: the script may write into the result, as `loss += ...` does.
        return every.view(len(words), *part.shape).sum(0).to(part.dtype)

    def require_raised_on_all(self) -> None:
        """Report an exception of an operation on the own rows.

        Raises:
            RankDesyncError: another rank does something else than this operation.
        """
        self._word("", None)

    def _word(
        self, kind: str, part: torch.Tensor | None, numbers: Sequence[int] = ()
    ) -> list[list[int]]:
        """Return the words of all ranks.

        Args:
            kind: kind of message.
            part: tensor whose shape and dtype are equal on all ranks; None: an operation has raised
                an exception.
            numbers: of this rank.
        """
        self._require_here()
        action = Action.ROWS_RAISED if part is None else Action.ROWS
        operation = zlib.crc32(self.operation.encode())
        facts = (
            0 if part is None else zlib.crc32(f"{kind} {tuple(part.shape)} {part.dtype}".encode())
        )
        words = self._view.word(action, operation, facts, *numbers)
        actions = {word[0] for word in words}
        is_same_operation = len({tuple(word[1:3]) for word in words}) == 1
        if (
            Action.ROWS_RAISED in actions
            and actions <= {Action.ROWS, Action.ROWS_RAISED}
            and is_same_operation
        ):
            if action == Action.ROWS:
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
        in_backward = (
            torch._C._current_graph_task_id() != -1
        )  # private; it may have threads of its own
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
