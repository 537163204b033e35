"""Witness: a second rank computes a microbatch of each rank again, which detects silent data corruption.

A wrong gradient of one rank is added into the sum of all ranks, so the weights of all ranks are wrong equally, and
comparisons of weights find no difference. But the gradient of a microbatch has the same bits on every rank: it depends
on the weights, buffers and position at the beginning of the step, and on the data of the microbatch. In a witnessed
step, rank `r + 1` therefore computes one microbatch of rank `r` again. On a difference, rank `r + 2` decides.
"""

from __future__ import annotations

import hashlib
import math
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch
from samestep.data.structure import TensorSpec
from samestep.distributed.devices import device_identity, device_kind, is_accelerator
from samestep.distributed.status import ranks_text
from samestep.distributed.world import World, all_gather, gather_numbers
from samestep.engine.buffer_rules import buffers_of
from samestep.engine.checksum import Part, sum_of_parts
from samestep.engine.nested_data import Packed, pack, unpack
from samestep.engine.step_runner import StepRunner
from samestep.engine.step_stats import StepStats
from samestep.errors import InputError, WitnessError
from samestep.strategies.reduction import communicate

Checksums = dict[str, int]  # of loss, count, gradients and buffers of one microbatch
_MAX_LISTED = 3  # values in a report


class Task(NamedTuple):
    """A microbatch that is computed again."""

    number: int
    size: int
    packed: Packed


def wrong_ranks(owner: int, size: int, results: Sequence[Checksums]) -> list[int]:
    """Return the ranks whose results of a microbatch are wrong: one rank, or two if the results do not decide.

    Args:
        owner: the rank of the microbatch, whose result differs from that of the next rank.
        size: number of ranks.
        results: of the owner, of the next rank, of the rank after it, and again of the next rank. On two ranks the
            third result is the second one of the owner, so a rank with two different results is wrong.
    """
    first, second, third, fourth = results
    witness = (owner + 1) % size
    if size == 1:
        return [owner]
    is_owner, is_witness = (third != first, fourth != second) if size == 2 else (third == second, third == first)
    if is_owner == is_witness:
        return sorted([owner, witness])
    return [owner if is_owner else witness]


class Witness:
    """Computes a microbatch of the previous rank again, every `every` steps, and compares loss, gradients and buffers.

    The microbatch rotates over those of a rank. With one rank, the rank itself computes its microbatch again.

    Attributes:
        last_clean: the last witnessed step without a difference, at most one.
    """

    def __init__(self, every: int, runner: StepRunner, world: World, previous: Witness | None = None) -> None:
        self._every, self._runner, self._world = every, runner, world
        self.last_clean: list[int] = [] if previous is None else previous.last_clean
        self._own: Microbatch | None = None  # the witnessed microbatch of this rank
        self._computed: dict[str, torch.Tensor] = {}  # checksums of the own microbatch
        self._task: Task | None = None  # that this rank computes again
        runner.observe = self._observe_own

    def is_due(self, position: int) -> bool:
        """Return whether the step after `position` steps is witnessed."""
        return (position + 1) % self._every == 0

    def begin_step(self, batch: GlobalBatch, position: int) -> None:
        """Send a microbatch of this rank to the next rank; a collective.

        Raises:
            InputError: the data of a microbatch cannot be sent; on every rank.
        """
        local = batch.local_microbatches
        self._own = local[(position + 1) // self._every % len(local)] if local else None
        self._computed = {}
        own = self._own and Task(self._own.number, self._own.size, pack(self._own.data, self._world.device))
        self._task = self._from_previous(own)

    def end_step(self, batch: GlobalBatch, stats: StepStats, position: int) -> None:
        """Compute the received microbatch again, and compare; a collective, before the update.

        Raises:
            WitnessError: results differ; raised on every rank with the same message. The state is that before the step.
        """
        own: Checksums = {}
        if self._own is not None:
            number = self._own.number
            own = {**_numbers(stats.losses[number], stats.counts[number]), **_as_numbers(self._computed)}
        again = self._compute(self._task, batch, position)
        rows = gather_numbers(self._world, [_digest(own), _digest(again)])
        size = self._world.size
        owners = [rank for rank in range(size) if rows[rank][0] != rows[(rank + 1) % size][1]]
        if owners:
            raise self._error(owners, [own, again], batch, position)
        self._own, self._task = None, None
        self.last_clean[:] = [position + 1]

    def _from_previous(self, task: Task | None) -> Task | None:
        """Send a task to the next rank, and return that of the previous one; a collective."""
        world = self._world
        row = task and [task.number, task.size, *task.packed[:-1], len(task.packed.data)]
        rows: list[Any] = all_gather(row, world)
        specs = [[TensorSpec(*spec) for spec in other[3]] if other else [] for other in rows]
        for spec in (spec for tensors in specs for spec in tensors):
            if not spec.dtype:
                raise InputError(
                    f"witness_every with a microbatch whose {spec.path}",
                    expected="tensors, numbers, text and None in tuples, lists and dicts, which can be sent to another "
                    "rank",
                    fix="return such values from the dataset and the collate function, or leave out witness_every",
                    code="E_INCOMPATIBLE",
                )
        if world.size == 1:
            return task
        previous, following = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        received = None
        if rows[previous] is not None:
            number, size, structure, _, strides, length = rows[previous]
            data = torch.empty(length, dtype=torch.uint8, device=world.device)
            received = Task(number, size, Packed(structure, specs[previous], strides, data))
        sent = [] if task is None else [(task.packed.data, following)]
        expected = [] if received is None else [(received.packed.data, previous)]
        world.run_collective(lambda: communicate(world, sent, expected), "the exchange of witnessed microbatches")
        return received

    def _compute(self, task: Task | None, batch: GlobalBatch, position: int) -> Checksums:
        """Compute a microbatch again from the state at the beginning of the step, and leave everything unchanged."""
        if task is None:
            return {}
        runner = self._runner
        results, tables = dict(runner.forward.results), [module._buffers for module in runner.model.modules()]
        keys = [set(table) for table in tables]
        gradients = [(parameter, parameter.grad) for parameter in runner.names]
        for parameter, _ in gradients:
            parameter.grad = None
        computed: dict[str, torch.Tensor] = {}
        try:
            runner.buffers.restore()
            with runner.generators.preserved(), self._observe(computed):
                microbatch = Microbatch(task.number, task.size, unpack(task.packed))
                _, loss = runner.forward(runner.model, microbatch, position)
                torch.autograd.backward(*runner.roots(loss.sum, batch.size))
        finally:
            for table, known in zip(tables, keys, strict=True):
                for key in table.keys() - known:  # caches that the forward registered
                    del table[key]
            runner.buffers.restore()
            runner.forward.results = results
            for parameter, gradient in gradients:
                parameter.grad = gradient
        return {**_numbers(float(loss.sum.detach()), float(loss.count)), **_as_numbers(computed)}

    @contextmanager
    def _observe_own(self, microbatch: Microbatch) -> Iterator[None]:
        if microbatch is not self._own:
            yield
            return
        with self._observe(self._computed):
            yield

    @contextmanager
    def _observe(self, computed: dict[str, torch.Tensor]) -> Iterator[None]:
        """Record checksums of the gradients in the block, before a reduction, and of the buffers at its end."""

        def record(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # several times, if the gradient arrives in several parts
                computed[f"gradient of {name}"] = _checksum_of(parameter.grad)

        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: record(name, p))
            for parameter, name in self._runner.names.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name, buffer in buffers_of(self._runner.model).items():
            computed[f"buffer {name}"] = _checksum_of(buffer)

    def _error(
        self, owners: Sequence[int], computed: Sequence[Checksums], batch: GlobalBatch, position: int
    ) -> WitnessError:
        """Decide which ranks are wrong, and restore the state before the step; a collective."""
        runner, world = self._runner, self._world
        number = self._own.number if self._own is not None else -1
        fourth = self._compute(self._task, batch, position) if world.size == 2 else {}
        self._task = self._from_previous(self._task)
        third = self._compute(self._task, batch, position)
        self._own, self._task = None, None
        for parameter in runner.names:
            parameter.grad = None
        runner.scaler.update(runner.scaler.get_scale())  # no change of the scale, but the end of this step
        place = f"host {socket.gethostname()}, device {device_identity(world.device)}"
        rows: list[Any] = all_gather([number, place, *computed, third, fourth], world)
        wrong: set[int] = set()
        lines, is_decided = [], True
        for owner in owners:
            witness, decider = ((owner + offset) % world.size for offset in (1, 2))
            results = [rows[owner][2], rows[witness][3], rows[decider][4], rows[witness][5]]
            ranks = wrong_ranks(owner, world.size, results)
            is_decided = is_decided and len(ranks) == 1
            wrong.update(ranks)
            names = [name for name in {**results[0], **results[1]} if results[0].get(name) != results[1].get(name)]
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            by = f"rank {witness}" if witness != owner else "the same rank"
            lines.append(
                f"microbatch {rows[owner][0]} of rank {owner} and its repetition on {by} differ in {len(names)} of "
                f"{len(results[1])} values: {', '.join(names[:_MAX_LISTED])}{more}"
            )
        lines = [*(f"rank {rank}: {rows[rank][1]}" for rank in sorted(wrong)), *lines]
        return _witness_error(position + 1, sorted(wrong), lines, self.last_clean, is_decided=is_decided)


def _witness_error(
    step: int, wrong: Sequence[int], lines: Sequence[str], last_clean: Sequence[int], *, is_decided: bool
) -> WitnessError:
    problem = f"{ranks_text(list(wrong))} computed wrong values"
    fix = "take the device out of service and test it and its memory"
    if not is_decided:
        problem = f"one of {ranks_text(list(wrong))} computed wrong values, and further results do not decide which"
    if len(wrong) > 1:
        fix = (
            "look for code whose results depend on the rank, on earlier calls or on the order of operations; "
            "if there is none, test these devices and their memory"
        )
    last = f"last witnessed without a difference in step {last_clean[0]}" if last_clean else "never witnessed before"
    checkpoint = f"a checkpoint of step {last_clean[0]} or before" if last_clean else "the beginning"
    error = WitnessError(
        "\n    ".join([f"step {step}: {problem}; {last}", *lines]),
        expected="the loss, the gradients and the buffers of a microbatch have the same bits on every rank",
        fix=f"{fix}; resume from {checkpoint}: steps since then can contain wrong values",
    )
    error.ranks = tuple(wrong)
    return error


def _checksum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that depend on every bit of a tensor, without a wait for its device."""
    return sum_of_parts({"": Part.whole(tensor)}, tensor.device)


def _numbers(loss: float, count: float) -> Checksums:
    """Return the bits of loss and count; sums over ranks change the sign of zero and the bits of NaN."""
    values = {"loss": loss, "count": count}
    return {
        name: int.from_bytes(struct.pack("<d", math.nan if math.isnan(value) else value + 0.0), "little")
        for name, value in values.items()
    }


def _as_numbers(values: Mapping[str, torch.Tensor]) -> Checksums:
    """Return checksums as numbers, in the order of their names: parameters can receive gradients in any order."""
    names = sorted(values)
    if not names:
        return {}
    first = values[names[0]].device
    return dict(zip(names, torch.stack([values[name].to(first) for name in names]).tolist(), strict=True))


def _digest(values: Checksums) -> int:
    """Return 64 signed bits that depend on all checksums of a microbatch; 0 without a microbatch."""
    if not values:
        return 0
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), signed=True)


def require_witness_support(every: int | None, config: StepConfig, world: World, *, sync_batch_norm: bool) -> None:
    """Refuse options under which no rank can compute a microbatch of another one with the same bits; a collective.

    Without a witness (`every` is None), nothing is refused.

    Raises:
        InputError: there is such an option, or ranks have different devices; on every rank.
    """
    if every is None:
        return
    strategy = world.strategy.name
    is_deterministic = torch.are_deterministic_algorithms_enabled() or not is_accelerator(world.device)
    kinds = all_gather(device_kind(world.device), world)
    problem, fix = "", "--strategy ddp"
    if world.mesh_shape.splits_model or strategy in ("dp", "device_map"):
        problem = f"the mesh {world.mesh_shape.name}" if world.mesh_shape.splits_model else f"strategy {strategy}"
    elif sync_batch_norm:
        problem, fix = "step.batch_norm: sync", "set step.batch_norm: microbatch"
    elif config.gather == "global":
        problem, fix = "step.gather: global", "set step.gather: microbatch"
    elif not is_deterministic:
        problem, fix = "step.reduction: fast on a GPU", "set step.reduction: exact"
    elif len(set(kinds)) > 1:
        problem, fix = f"different devices: {', '.join(kinds)}", "use devices of one kind"
    if problem:
        raise InputError(
            f"witness_every with {problem}",
            expected="each rank can compute any microbatch without the others, with the same bits",
            fix=f"{fix}, or leave out witness_every",
            code="E_INCOMPATIBLE",
        )
