"""Evaluation that counts every sample once, with the same result on any number of ranks.

An evaluation leaves modes, buffers, attributes and parameters of the model unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from samestep.config import StepConfig
from samestep.data.batch import GlobalBatch, Microbatch, move_next_to
from samestep.data.joint_batch import Batches, joint_batch
from samestep.data.loader import Loader
from samestep.distributed.collective_check import BATCH
from samestep.distributed.devices import set_tf32
from samestep.distributed.rng import preserved_generators
from samestep.distributed.world import World, all_gather
from samestep.engine.buffer_rules import listed
from samestep.engine.global_loss import GlobalLoss, part_of_loss
from samestep.engine.loss import Loss, LossFunction, StepLoss, as_step_loss, no_loss
from samestep.engine.microbatch_forward import EVALUATION, ForwardFunction, MicrobatchForward
from samestep.engine.module_attributes import AttributeCopies
from samestep.engine.multi_loss import MultiLoss
from samestep.engine.side_effects import ParameterCheck
from samestep.engine.step_stats import means
from samestep.engine.tensor_bits import copy_tensors
from samestep.errors import InputError, RunError
from samestep.metrics.counts import rounded_sum
from samestep.metrics.metrics import LossMetric, Metric, Metrics, as_metrics, require_loss, require_outputs
from samestep.strategies.strategy import broadcast_model


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # By `train`, which modules override, and parents first: the call sets the children too.
        for module, training in modes:
            if module.training is not training:
                module.train(training)


class EvaluationState:
    """Buffers, attributes and parameters of a model, which an evaluation leaves unchanged.

    Attributes:
        written: names of parameters that changed inside the block.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [
            (module._buffers, key, buffer, buffer.clone())
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._attributes = AttributeCopies(model)
        self._parameters = ParameterCheck(model)
        self._parameters.begin()
        self.written: list[str] = []

    def __enter__(self) -> EvaluationState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.written = self._parameters.written()

    def restore(self) -> None:
        """Set all buffers and attributes to their values before the evaluation."""
        for table, key, buffer, _ in self._buffers:
            table[key] = buffer
        copy_tensors([buffer for _, _, buffer, _ in self._buffers], [values for *_, values in self._buffers])
        self._attributes.restore()


def written_in_evaluation_error(names: Sequence[str]) -> InputError:
    """Return the error of an evaluation that changes parameters."""
    return InputError(
        f"the forward of an evaluation changed {listed([f'parameter {name}' for name in names])}",
        expected="an evaluation writes no parameters: the order of microbatches would decide the result",
        fix="write parameters in the loop; nn.Embedding(max_norm=...) writes in every forward",
        code="E_BUFFER",
    )


class EvaluationOutputs:
    """Computes the microbatches of this rank in an evaluation, one after another.

    Attributes:
        world: the ranks that together return every microbatch once.
    """

    def __init__(self, model: torch.nn.Module, forward: MicrobatchForward, world: World) -> None:
        self.world, self.forward, self._model = world, forward, model

    def __call__(
        self, batch: GlobalBatch, position: int, state: EvaluationState
    ) -> Iterator[tuple[Microbatch, Any, list[Loss]]]:
        """Yield microbatches with outputs and the loss of each term; each starts with `state`."""
        if self.forward.gathers:
            yield from self._with_global_loss(batch, position, state)
            return
        for microbatch in batch.local_microbatches:
            result = self.forward.term_losses(self._model, microbatch, EVALUATION, position)
            state.restore()
            yield microbatch, *result
        for filler in batch.fillers:
            self.forward.term_losses(self._model, filler, EVALUATION, position)
            state.restore()

    def _with_global_loss(
        self, batch: GlobalBatch, position: int, state: EvaluationState
    ) -> Iterator[tuple[Microbatch, Any, list[Loss]]]:
        computed = []
        for microbatch in (*batch.local_microbatches, *batch.fillers):
            computed.append(self.forward.outputs(self._model, microbatch, EVALUATION, position))
            state.restore()
        gathered, terms = GlobalLoss(self.forward, self.world).terms(computed, batch, EVALUATION, position)
        for entry in computed[: len(batch.local_microbatches)]:
            losses = [part_of_loss(term, entry.microbatch, gathered.bounds) for term in terms]
            yield entry.microbatch, entry.outputs, losses


class _NoLoss(StepLoss):
    """The loss of an evaluation that computes metrics only."""

    def __init__(self) -> None:
        self._function = no_loss

    def term_losses(self, outputs: Any, targets: Any, samples: int) -> list[Loss]:
        return [Loss(torch.zeros(()), 0.0)]


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Batches],
    metrics: Metrics = (),
    *,
    world: World,
    loss: LossFunction | MultiLoss | None = None,
    forward: ForwardFunction | None = None,
    config: StepConfig | None = None,
) -> dict[str, float]:
    """Evaluate a model without an optimizer; all ranks use the weights of rank 0.

    Args:
        model: moved to the world's device; modes, buffers, attributes and parameters stay unchanged.
        batches: evaluation data, such as a loader.
        metrics: as in `Engine.evaluate`.
        world: the ranks, from `samestep.start()`.
        loss: as in `Engine`; None for metrics only.
        forward: as in `Engine.step`; the mapping needs no `loss`.
        config: precision, TF32 and seed.

    Returns:
        `loss` if there is one, `samples` and every metric, each sample counted once.

    Raises:
        InputError: there is nothing to compute, a metric is unknown or does not support the outputs, or the strategy
            divides the model.
    """
    step_loss = as_step_loss(loss) if loss is not None else _NoLoss()
    objects = as_metrics(metrics, ignore_index=step_loss.ignore_index)
    if not objects and loss is None and forward is None:
        raise InputError(
            "samestep.evaluate received neither metrics nor a loss",
            expected="something to compute",
            fix='samestep.evaluate(model, batches, ["accuracy"], world=world)',
            code="E_METRIC",
        )
    if world.mesh_shape.splits_model:
        raise InputError(
            f"samestep.evaluate with the mesh {world.mesh_shape.name}",
            expected="a complete model on each rank",
            fix="use Engine.evaluate, or samestep.start() without a strategy",
            code="E_INCOMPATIBLE",
        )
    with world.context.collective_check.operation("samestep.evaluate"):
        config = config or StepConfig()
        set_tf32(world.device, allowed=config.tf32)
        model.to(world.device)
        broadcast_model(model, world)
        microbatch_forward = MicrobatchForward(step_loss, config, world.device)
        microbatch_forward.function, microbatch_forward.needs_loss = forward, loss is not None
        microbatch_forward.gathers &= loss is not None
        compute = EvaluationOutputs(model, microbatch_forward, world.data)
        values = evaluate_batches(model, batches, objects, compute, world, until_stop=False)
    assert values is not None
    return values


def evaluate_batches(
    model: torch.nn.Module,
    batches: Iterable[Batches],
    metrics: Sequence[Metric | LossMetric],
    compute: EvaluationOutputs,
    all_ranks: World,
    *,
    until_stop: bool,
) -> dict[str, float] | None:
    """Return `loss`, the mean of each of several terms, `samples` and every metric over `batches`.

    Losses are gathered per microbatch and summed with one rounding, so the result has the same bits on every number of
    ranks. No microbatch is padded. With `until_stop`, the evaluation ends early with None on every rank if a rank
    receives a stop request.

    Raises:
        RunError: the loss counts nothing.
    """
    world, loss = compute.world, compute.forward.active_loss
    counting = [metric for metric in metrics if not isinstance(metric, LossMetric)]
    rows: list[tuple[int, list[torch.Tensor | float]]] = []  # slot; sum and count of each term, samples
    identities = []
    names: list[list[Any]] = []  # slot and name of the values of a forward function
    scalars: list[torch.Tensor] = []  # their sums and counts
    slots = 0
    stopped = False
    with evaluation_mode(model), torch.no_grad(), preserved_generators(world.device), EvaluationState(model) as state:
        for position, item in enumerate(batches.complete_epoch() if isinstance(batches, Loader) else batches):
            batch = joint_batch(item, has_forward=compute.forward.function is not None)
            if until_stop and _stops_before_batch(all_ranks, gathers=compute.forward.gathers):
                stopped = True
                break
            world.context.status.heartbeat()
            identities.append(f"{batch.identity} of {batch.dataset}")
            for microbatch, outputs, losses in compute(batch, position, state):
                numbers = [number for term in losses for number in (term.sum, term.count)] or [0.0, 0.0]
                rows.append((slots + microbatch.number, [*numbers, microbatch.size]))
                targets = compute.forward.with_targets(microbatch).data[1]
                require_outputs(outputs, targets, counting)
                for metric in counting if microbatch.size else ():
                    metric.update(move_next_to(outputs, targets), targets)
            names += [[slots + number, name] for number, name in compute.forward.value_names()]
            scalars += compute.forward.scalars()
            compute.forward.results = {}
            slots += batch.microbatches
    if until_stop and _any_rank(stopped, all_ranks):
        for metric in counting:
            metric.reset()
        return None
    digest = hashlib.blake2b("\n".join(identities).encode(), digest_size=4).hexdigest()
    all_ranks.context.collective_check.agree("evaluation", {BATCH: f"{len(identities)} batches ({digest})"})
    (*totals, samples), of_values = _sums(rows, 2 * loss.term_count + 1, slots, scalars, state.written, world)
    values = _means(loss, totals, needs_loss=compute.forward.needs_loss)
    require_loss(values, metrics)
    values |= {"samples": int(samples), **_gathered_means(names, of_values, compute)}
    return values | {
        metric.name: metric.function(values["loss"]) if isinstance(metric, LossMetric) else metric.compute(world)
        for metric in metrics
    }


def _gathered_means(names: list[list[Any]], numbers: Sequence[float], compute: EvaluationOutputs) -> dict[str, float]:
    """Return the means of values of a forward function from their slots and names, sums and counts.

    A collective, if there is such a function.
    """
    if compute.forward.function is None:
        return {}
    own = [[*name, *numbers[2 * i : 2 * i + 2]] for i, name in enumerate(names)]
    return means(
        [(name, total, count) for _, name, total, count in chain.from_iterable(all_gather(own, compute.world))]
    )


def _means(loss: StepLoss, totals: list[float], *, needs_loss: bool) -> dict[str, float]:
    """Return the mean loss and those of its terms, from their sums and counts; nothing without a count.

    Raises:
        RunError: the loss counts nothing.
    """
    if any(totals[1::2]):
        return loss.means(list(zip(totals[::2], totals[1::2], strict=True)))
    if needs_loss:
        raise RunError("the loss counted nothing in evaluation", fix="check for ignored targets", code="E_LOSS")
    return {}


def _sums(
    rows: Sequence[tuple[int, list[torch.Tensor | float]]],
    columns: int,
    slots: int,
    scalars: Sequence[torch.Tensor],
    written: list[str],
    world: World,
) -> tuple[list[float], list[float]]:
    """Return the sum of each column over the rows of all ranks, one row per slot, and `scalars`; a collective.

    The host waits for the device once.

    Raises:
        InputError: the evaluation has written parameters on some rank.
    """
    data = _on_device([number for _, numbers in rows for number in numbers], world.device).view(-1, columns)
    places = torch.tensor([slot for slot, _ in rows], dtype=torch.int64).to(world.device, non_blocking=True)
    gathered = torch.zeros(columns, slots + 1, dtype=torch.float64, device=world.device)
    gathered.index_copy_(1, places, data.T)
    gathered[0, slots:].fill_(len(written))
    world.all_reduce(gathered)  # each element has one non-zero summand, so the order of summation is irrelevant
    numbers = torch.cat([gathered.reshape(-1), _on_device(scalars, world.device)]).tolist()
    if numbers[slots] > 0:
        raise written_in_evaluation_error(sorted(set(chain.from_iterable(all_gather(written, world)))))
    sums = [rounded_sum(numbers[column * (slots + 1) :][:slots]) for column in range(columns)]
    return sums, numbers[columns * (slots + 1) :]


def _on_device(scalars: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Return scalars as a float64 vector on a device, without a wait for it."""
    positions = [number for number, scalar in enumerate(scalars) if isinstance(scalar, torch.Tensor)]
    plain = [0.0 if isinstance(scalar, torch.Tensor) else float(scalar) for scalar in scalars]
    vector = torch.tensor(plain, dtype=torch.float64).to(device, non_blocking=True)
    if positions:
        tensors = [torch.as_tensor(scalars[p]).detach().double().view(1) for p in positions]
        values = torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])
        vector.index_copy_(0, torch.tensor(positions).to(device, non_blocking=True), values)
    return vector


def _stops_before_batch(world: World, *, gathers: bool) -> bool:
    """Return whether this rank stops; ranks that compute a batch together stop together."""
    is_joint = gathers or world.mesh_shape.splits_model
    return _any_rank(world.stop_requested, world) if is_joint else world.stop_requested


def _any_rank(flag: bool, world: World) -> bool:
    """Return whether `flag` is set on any rank; a collective."""
    total = torch.tensor([float(flag)], device=world.device)
    world.all_reduce(total)
    return bool(total > 0)
