"""State of the global view in one process: words, places that divide calls, and the summary.

A word is a short message that each rank sends before it communicates, or decides. All words have
one size and one hash, so that ranks which do different things end with an error, and never hang.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._device import DeviceContext  # private

from samestep.data.own_rows import Bounds
from samestep.data.sample_reader import Decision
from samestep.distributed.collective_check import intercept_all, refuse_inside
from samestep.distributed.device_reads import device_reads
from samestep.distributed.devices import accelerator_module, is_accelerator
from samestep.distributed.kernels import EqualKernels
from samestep.distributed.logging import logger
from samestep.distributed.rng import derive_seed
from samestep.distributed.world import World, all_gather
from samestep.errors import RankDesyncError, RankMismatchError
from samestep.microbatches import Slices, default_microbatches, rank_bounds
from samestep.reduce.fast import FastReduction, Reduction
from samestep.view.crossings import RowBounds
from samestep.view.kinds import Kind
from samestep.view.messages import Action, Ranks, RowMessages
from samestep.view.rank_comparison import ONE_DECISION, InStep
from samestep.view.region import current_region
from samestep.view.rows_sums import BATCH_LIMIT, OUTPUT_LIMIT, torch_gathers
from samestep.view.rows_tensor import rows_of
from samestep.view.slice_threads import SliceThreads
from samestep.view.strategy import Strategy

_WORD = 8  # integers; the last one is a request to stop


@dataclass
class ModuleSummary:
    """Calls of one module, for the summary.

    Attributes:
        module: class of the module.
        divided: number of divided calls.
        watched: number of first calls of a kind, which are computed whole.
        whole: number of other calls that were computed whole.
        reasons: reasons for whole calls.
        last_reason: the last one of them.
        rows: rows of the last call.
        lines: lines that were logged about the module.
    """

    module: str
    divided: int = 0
    watched: int = 0
    whole: int = 0
    reasons: list[str] = field(default_factory=list)
    last_reason: str = ""
    rows: int = 0
    lines: set[str] = field(default_factory=set)

    def add_reason(self, reason: str) -> None:
        """Add a reason once."""
        self.last_reason = reason
        if reason not in self.reasons:
            self.reasons.append(reason)


class View:
    """Global view of this process.

    Args:
        world: the ranks.

    Attributes:
        is_stopping: a rank has requested the end of the loop; equal on all ranks.
        raises_interrupt: such a request is a KeyboardInterrupt, at the same word on all ranks.
        keeps_rows: large tensors of batches are not gathered.
        parallel_modules: modules of `samestep.parallel`, on one rank too.
        batch_decisions: how loaders read their batches, by data set.
        slice_threads: threads for the slices of divided calls.
    """

    # Tests of the rules have small models and tensors.
    divides_small_calls: ClassVar[bool] = False
    batch_limit: ClassVar[int] = BATCH_LIMIT
    output_limit: ClassVar[int] = OUTPUT_LIMIT

    def __init__(self, world: World) -> None:
        self.ranks = Ranks(world)
        self.reduction: Reduction = FastReduction(self.ranks, hook=world.strategy.hook)
        self.device = world.device
        self.in_step = InStep(lambda text: all_gather(text, world), is_alone=world.size == 1)
        is_needed = world.size > 1 and is_accelerator(world.device)
        self._equal_kernels = EqualKernels(is_needed=is_needed)
        self.kinds: dict[Hashable, Kind] = {}
        self.modules: list[ModuleSummary] = []
        self.parallel_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.batch_decisions: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.keeps_rows = True
        self.is_stopping = False
        self.raises_interrupt = False
        self.before_word: Callable[[], None] | None = None
        self._stop: Callable[[], bool] = world.session.stop
        self._status = world.session.status
        self._strategies: weakref.WeakSet[Strategy] = weakref.WeakSet()
        self._is_suspended = False
        self._process = os.getpid()
        self._words = 0
        self._notes: set[str] = set()
        self._backward = -1  # task of autograd that has sent a word
        self._row_messages: dict[int, RowMessages] = {}
        self._cleanup = ExitStack()
        self.slice_threads = SliceThreads()
        self._cleanup.callback(self.slice_threads.end)
        if world.size > 1:
            self._cleanup.enter_context(torch_gathers())
        refuse = partial(refuse_inside, self.parallel_modules)
        self._cleanup.enter_context(intercept_all(refuse))
        world.session.collective_check.before_collective = refuse
        self._cleanup.callback(setattr, world.session.collective_check, "before_collective", None)
        self._step_hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self, error: type[BaseException] | None) -> None:
        """End the view with its process group."""
        self._step_hook.remove()
        self._equal_kernels.end()
        self._cleanup.close()
        # After an error the other ranks may be anywhere, and are not asked.
        if error is None and self.ranks.size > 1 and os.getpid() == self._process:
            self.require_same_action(self.word(Action.END))

    def add(self, summary: ModuleSummary, strategy: Strategy) -> None:
        """Add a module with divided calls."""
        self.modules.append(summary)
        self._strategies.add(strategy)
        self.in_step.has_equal_parameters &= not strategy.splits_module
        # Rows of a batch are divided between all ranks, with one slice for each.
        self.keeps_rows &= strategy.ranks.size == self.ranks.size and not strategy.has_stages

    def row_messages(self, ranks: Ranks | None = None) -> RowMessages:
        """Return the messages for `Rows` that some ranks share; those of all by default."""
        ranks = ranks or self.ranks
        if id(ranks) not in self._row_messages:
            self._row_messages[id(ranks)] = RowMessages(self, ranks)
        return self._row_messages[id(ranks)]

    # --- places of the program -------------------------------------------------------------------

    def whole_here(self) -> str | None:
        """Return why a call at this point of the program is whole; None if it can be divided.

        The reason is empty for a part of another call, which is counted.
        """
        if not self._is_own_here():
            return ""
        reason = None
        # Private: hooks of checkpoints, which compute the call again in the backward, and then as a
        # part of their own graph; modes that observe operations, as counters of them do.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        modes: list[object] = torch.overrides._get_current_function_mode_stack()
        if threading.current_thread() is not threading.main_thread():
            reason = "is called in another thread"
        elif torch._C._functorch.peek_interpreter_stack() is not None:
            reason = "is called under torch.func"
        elif forward_ad._current_level >= 0:  # private; inside of `dual_level`
            reason = "is called with forward-mode derivatives"
        elif torch.is_anomaly_enabled():  # the backward may fail on one rank only
            reason = "is called while anomalies are detected"
        elif hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
            reason = "is called inside of a checkpoint"
        elif torch._C._len_torch_dispatch_stack() or not all(
            isinstance(mode, DeviceContext)  # of torch.set_default_device
            for mode in modes
        ):
            reason = "is called inside of a mode that observes operations"
        return reason

    def exchanges_here(self) -> bool:
        """Whether this thread and point of the program can exchange messages with other ranks."""
        return self._is_own_here() and threading.current_thread() is threading.main_thread()

    def _is_own_here(self) -> bool:
        """Whether a call here is one of the script, and of its only process that has ranks."""
        return (
            not self._is_suspended
            and current_region() is None
            # Otherwise a worker of a loader, without a group of its own.
            and os.getpid() == self._process
            # Otherwise in a backward, which recomputes.
            and torch._C._current_graph_task_id() == -1
            and not torch._C._is_tracing()
            and not torch.compiler.is_compiling()
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Compute all calls whole during the block."""
        before = self._is_suspended
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = before

    def draw_seed(self, draws: Sequence[Any], *, is_exact: bool) -> int:
        """Return a seed of the random draws of a divided call.

        It comes from the script's generator, which checkpoints contain, and which advances alike on
        all ranks.

        Args:
            draws: the draws of the call; the generator does not advance without any.
            is_exact: draws on CPUs have streams of their own, too.
        """
        if not draws or not (is_exact or is_accelerator(self.device)):
            return 0
        if not is_accelerator(self.device):
            return derive_seed("model", int(torch.randint(2**63 - 1, ())), 0)
        # Its state is on the host, so this does not wait.
        generator = accelerator_module().default_generators[self.device.index or 0]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # torch requires multiples of four
        return derive_seed("model", generator.initial_seed() % 2**63, offset)

    # --- words -----------------------------------------------------------------------------------

    def word(self, action: Action, *fields: int) -> list[list[int]]:
        """Send a word to all ranks; return action, number of the word and `fields` of each rank.

        Each word carries a hash of the facts that must be equal on all ranks.

        Raises:
            RankMismatchError: something that must be equal differs between ranks.
            KeyboardInterrupt: a rank has requested the end of the script.
        """
        if self.before_word is not None:
            self.before_word()
        self._words += 1
        own = [self.in_step.digest(), action, self._words, *fields]
        # Ranks at different actions must still send messages of one size.
        own += [0] * (_WORD - 1 - len(own))
        words = self.ranks.words([*own, int(self._stop())])
        self.is_stopping |= any(word[-1] for word in words)
        self.in_step.compare([word[0] for word in words])
        if self.raises_interrupt and self.is_stopping:
            self.raises_interrupt = False  # what the script does to end needs words too
            raise KeyboardInterrupt
        return [word[1:-1] for word in words]

    def require_same_action(self, words: Iterable[list[int]]) -> None:
        """Require that all ranks do the same.

        Raises:
            RankDesyncError: they do not.
        """
        first, *others = words
        for rank, word in enumerate(others, start=1):
            if word[:2] != first[:2]:
                # Found by its number, which is its value.
                places = [Action(action).place for action, *_ in (first, word)]  # type: ignore[arg-type]
                raise RankDesyncError(
                    f"rank 0 is at {places[0]}, rank {rank} at {places[1]}",
                    expected="the same calls of models, backwards and steps on every rank",
                    fix=ONE_DECISION,
                    code="E_RANK_DESYNC",
                )

    def interrupt_on(self, stop: Callable[[], bool]) -> None:
        """Raise a `KeyboardInterrupt` on all ranks after `stop` has returned True on one."""
        self._stop = stop
        self.raises_interrupt = True

    def report(self, summary: ModuleSummary, text: str) -> None:
        """Log a line about a module once, on rank 0."""
        if self.ranks.rank == 0 and text not in summary.lines:
            summary.lines.add(text)
            logger.info("%s: %s", summary.module, text)

    def note(self, text: str) -> None:
        """Log a line about the script once, on rank 0."""
        if self.ranks.rank == 0 and text not in self._notes:
            self._notes.add(text)
            logger.info(text)

    def all_ranks_in_sum(self) -> bool:
        """Send a word before a sum in a divided call; return whether all ranks are in that sum."""
        return all(word[0] == Action.SUM_IN_CALL for word in self.word(Action.SUM_IN_CALL))

    def use_equal_kernels(self) -> None:
        """Use deterministic kernels up to the step of the optimizer, unless in a divided call."""
        if current_region() is None:
            self._equal_kernels.begin()

    def any_rank(self, *flags: bool, place: str = "") -> list[bool]:
        """Return for each flag whether some rank sets it; a rank may reach `place` alone."""
        if place:
            self.in_step.fact_of_place(place)
        words = self.word(Action.AGREE, *map(int, flags))
        self.require_same_action(words)
        return [any(column) for column in list(zip(*words, strict=True))[2 : 2 + len(flags)]]

    def begin_backward(self) -> None:
        """Compare the ranks before the first sum of a backward."""
        task = torch._C._current_graph_task_id()  # private
        # One word, however many divided calls the backward goes through.
        if task != self._backward:
            self._backward = task
            self.require_same_action(self.word(Action.BACKWARD))

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        """Count a step of an optimizer, and compare the ranks before it."""
        self._status.end_step()
        if self.ranks.size == 1 or self.whole_here() is not None:
            return
        for strategy in self._strategies:
            strategy.before_step(optimizer)
        splits = any(strategy.splits_module for strategy in self._strategies)
        self.in_step.facts_of_step(optimizer, has_equal_gradients=not splits)
        self.require_same_action(self.word(Action.STEP))
        self._equal_kernels.end()

    def require_equal(self, module: nn.Module, is_divided: Callable[[torch.Tensor], bool]) -> None:
        """Require that all ranks hold the same parameters and buffers.

        Args:
            module: the module.
            is_divided: whether ranks hold parts of a tensor, which are not compared.

        Raises:
            RankMismatchError: they do not.
        """
        if self.ranks.size == 1:
            return
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in module.state_dict(keep_vars=True).items():
            digest.update(name.encode())
            if nn.parameter.is_lazy(tensor):
                continue
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if is_divided(tensor):
                continue
            raw = device_reads.copy(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
            # Of a copy: `numpy()` ends that a forward can resize a buffer, as observers do.
            digest.update(raw.clone().numpy().data)
        own = int.from_bytes(digest.digest(), "little") >> 2
        words = self.word(Action.PARALLEL, own)
        self.require_same_action(words)
        for rank, word in enumerate(words):
            if word[2] != words[0][2]:
                raise RankMismatchError(
                    f"rank {rank} holds other parameters or buffers of {type(module).__name__} "
                    "than rank 0",
                    expected="equal parameters on all ranks, as from the same seed or file",
                    fix="seed the generators, or load the same weights, on every rank "
                    "before samestep.parallel",
                    code="E_RANK_MISMATCH",
                )


class ViewOfBatches:
    """Ranks of a view, for the batches of one loader (`data/own_rows.BatchRanks`).

    Args:
        view: the view.
    """

    def __init__(self, view: View) -> None:
        self.rank = view.ranks.rank
        self.size = view.ranks.size
        self._view = view
        # Rows of the first batch with a row for each rank, at most 8, as for calls of a module.
        self._microbatches: int | None = None

    def can_send(self) -> bool:
        """Whether this point of the program is one that all ranks reach."""
        return self._view.exchanges_here()

    def bounds(self, rows: int) -> Bounds | None:
        """Return the own rows of each rank in a batch; None if a rank would have none."""
        if rows < self.size:
            return None
        if self._microbatches is None:
            self._microbatches = default_microbatches(rows)
        bounds = rank_bounds(rows, self._microbatches, self.size)
        if any(start == stop for start, stop in bounds):
            return None
        return bounds

    def word(self, samples: int, *fields: int) -> list[list[int]]:
        """Return the integers of all ranks, which are at a batch with equal `samples`.

        Raises:
            RankDesyncError: another rank is not.
            RankMismatchError: something that must be equal differs between ranks.
        """
        self._view.in_step.fact_of_samples(samples)
        words = self._view.word(Action.BATCH, samples, *fields)
        self._view.require_same_action(words)
        return [word[2:] for word in words]

    def gather(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return the rows of all ranks."""
        return self._view.ranks.gather_rows([own], bounds, factor)

    def rows(self, own: torch.Tensor, bounds: Bounds, factor: int) -> torch.Tensor:
        """Return a tensor with the whole shape, of the own rows."""
        if not self._view.keeps_rows:
            return self.gather(own, bounds, factor)
        slices = Slices(bounds, self.size, self.rank)
        row_bounds = RowBounds(self._view.row_messages(), slices, factor)
        return rows_of(own, row_bounds, self._view.batch_limit)

    def decisions_of(
        self, dataset: Any, collate: Any, line: Hashable
    ) -> tuple[MutableMapping[Hashable, Decision], Hashable]:
        """Return the decisions of earlier loaders, and the key of a loader that a line has made.

        Decisions belong to the data set. Functions that the line makes again are distinguished by
        their code.
        """
        try:
            decisions = self._view.batch_decisions.setdefault(dataset, {})
            key = (getattr(collate, "__code__", collate), line)
            hash(key)
        except TypeError:  # a list as data set
            return {}, None
        return decisions, key
