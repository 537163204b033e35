"""Witness: a second rank computes a microbatch of each rank again, which detects silent data corruption.

A wrong gradient of one rank makes the weights of all ranks wrong equally. But a microbatch has the same bits on every
rank: rank `r + 1` computes one of rank `r` again, and on a difference, rank `r + 2` decides.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from samestep.data.batch import GlobalBatch, Microbatch
from samestep.distributed.devices import device_identity
from samestep.distributed.status import ranks_text
from samestep.distributed.world import all_gather
from samestep.engine.buffer_rules import buffers_of
from samestep.engine.callbacks import Callback
from samestep.engine.checksum import checksum
from samestep.engine.compatible_options import require_witness_support
from samestep.engine.engine import Engine
from samestep.engine.loss import Loss
from samestep.engine.nested_data import Packed, pack, send_to_next, unpack
from samestep.errors import WitnessError


class Witness(Callback):
    """Computes a microbatch of the previous rank again, every `every` steps, and compares loss, gradients and buffers.

    The microbatch rotates over those of a rank; one rank repeats its own. If results differ, the step raises
    `WitnessError` on every rank, before the update. The engine of every rank needs a witness with the same number.
    """

    repeats_microbatches = True

    def __init__(self, every: int) -> None:
        self._every = every
        self._last_clean = "never witnessed before"
        self._own: Microbatch | None = None  # witnessed microbatch of this rank
        self._hooks = ExitStack()  # which record the checksums of gradients

    def engine_created(self, engine: Engine) -> None:
        require_witness_support(self._every, engine.config, engine.world, engine.step_runner)

    def begin_step(self, engine: Engine, batch: GlobalBatch) -> None:
        self._own = None
        self._is_due = (engine.steps + 1) % self._every == 0
        if self._is_due:
            engine.world.context.collective_check.agree(f"the witness of step {engine.steps + 1}", {})
            self._runner = engine.step_runner
            self._samples = batch.size
            self._sums: dict[str, int] = {}  # checksums of the results of a microbatch
            if local := batch.local_microbatches:
                self._own = local[(engine.steps + 1) // self._every % len(local)]
            self._received = send_to_next(pack(self._own and tuple(self._own), engine.world.device), engine.world)

    def begin_microbatch(self, microbatch: Microbatch) -> None:
        self._hooks.close()
        if microbatch is self._own:
            self._record_gradients()

    def end_microbatch(self, microbatch: Microbatch, outputs: Any, loss: Loss) -> None:
        if self._own is not None and microbatch.number == self._own.number:
            self._record_forward(loss)

    def end_gradients(self, engine: Engine) -> None:
        self._hooks.close()
        if self._is_due:
            results = [self._sums, self._repeat(self._received, engine.steps)]
            rows = all_gather(results, engine.world)
            owners = [rank for rank, row in enumerate(rows) if row[0] != rows[(rank + 1) % len(rows)][1]]
            if owners:
                raise self._error(engine, owners, results)
            self._last_clean = f"last witnessed without a difference in step {engine.steps + 1}"

    def _record_gradients(self) -> None:
        def record(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # several times, if the gradient arrives in several parts
                self._sums[f"gradient of {name}"] = checksum({"": parameter.grad})

        for parameter, name in self._runner.names.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(record, name))
            self._hooks.callback(hook.remove)

    def _record_forward(self, loss: Loss) -> None:
        buffers = {f"buffer {name}": buffer for name, buffer in buffers_of(self._runner.model).items()}
        values = {"loss": loss.sum, "count": torch.as_tensor(loss.count), **buffers}
        self._sums |= {name: checksum({"": value}) for name, value in values.items()}

    def _repeat(self, packed: Packed, position: int) -> dict[str, int]:
        """Compute a microbatch from the state at the beginning of the step, and leave everything unchanged."""
        self._sums = {}
        values = unpack(packed)
        if values is None:
            return {}
        runner = self._runner
        results = dict(runner.forward.results)
        gradients = {parameter: parameter.grad for parameter in runner.names}
        for parameter in gradients:
            parameter.grad = None
        buffers = [(module._buffers, dict(module._buffers)) for module in runner.model.modules()]
        runner.buffers.restore()
        self._record_gradients()
        with runner.generators.preserved(), self._hooks:
            _, loss = runner.forward(runner.model, Microbatch(*values), position)
            self._record_forward(loss)
            torch.autograd.backward(*runner.roots(loss.sum, self._samples))
        for present, before in buffers:  # without caches that the forward registered
            present.clear()
            present.update(before)
        runner.buffers.restore()
        runner.forward.results = results
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return self._sums

    def _error(self, engine: Engine, owners: list[int], results: list[dict[str, int]]) -> WitnessError:
        """Decide which ranks are wrong, and restore the state before the step; a collective."""
        third = self._repeat(send_to_next(self._received, engine.world), engine.steps)
        for parameter in self._runner.names:
            parameter.grad = None
        engine.scaler.update(engine.scaler.get_scale())  # no change of the scale, but the end of this step
        place = f"host {socket.gethostname()}, device {device_identity(engine.world.device)}"
        rows: list[Any] = all_gather([*results, third, place, self._own and self._own.number], engine.world)
        wrong = [wrong_ranks(owner, rows) for owner in owners]
        ranks = sorted(set().union(*wrong))
        doubt = "one of " if max(map(len, wrong)) > 1 else ""
        lines = [f"step {engine.steps + 1}: {doubt}{ranks_text(ranks)} computed wrong values; {self._last_clean}"]
        lines += [f"rank {rank}: {rows[rank][3]}" for rank in ranks]
        for owner in owners:
            repeated = rows[(owner + 1) % len(rows)][1].items()
            names = [name for name, value in repeated if value != rows[owner][0].get(name)]
            lines.append(f"microbatch {rows[owner][4]} of rank {owner} differs in: {', '.join(names[:3])}")
        error = WitnessError(
            "\n    ".join(lines),
            expected="loss, gradients and buffers of a microbatch have the same bits on every rank",
            fix="test the device and its memory; resume from a checkpoint of the last step without a difference",
        )
        error.ranks = tuple(ranks)
        return error


def wrong_ranks(owner: int, rows: list[Any]) -> set[int]:
    """Return the rank whose result of a microbatch of `owner` is wrong, or two ranks if three results do not decide."""
    witness, decider = (owner + 1) % len(rows), (owner + 2) % len(rows)
    first, second, third = rows[owner][0], rows[witness][1], rows[decider][2]
    if third == second:
        return {owner}
    return {witness} if third == first and decider != owner else {owner, witness}
