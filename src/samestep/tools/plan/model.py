"""Step time and memory of a layout, from a calibration and the links of a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields

from samestep.tools.plan.calibration import Calibration, Stage
from samestep.tools.plan.collectives import Axis, Cluster, Link, at_level
from samestep.tools.plan.layouts import Layout

# Buckets of torch's DDP: the first, with the last gradients, and the others.
_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20
_STATISTICS_BYTES = 256  # message of losses and counts of each step
_BACKWARD = 2 / 3  # part of the time of a microbatch in backward


@dataclass(frozen=True)
class StepTime:
    """Parts of the time of a step in seconds.

    Attributes:
        compute: forward and backward of all microbatches of a rank, and the wait for data.
        update: clipping, optimizer and statistics.
        communication: messages that computation does not hide.
        bubble: wait of a pipeline rank for other stages.
    """

    compute: float
    update: float
    communication: float
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Time of a step."""
        return self.compute + self.update + self.communication + self.bubble

    def scaled(self, factor: float) -> StepTime:
        """Return all parts multiplied by a factor."""
        return StepTime(*(factor * part for part in astuple(self)))


@dataclass(frozen=True)
class Memory:
    """Parts of the memory of the rank with the largest memory, in bytes.

    Attributes:
        base: Python, torch, connections, data, workspace of kernels.
        parameters: parameters and buffers of this rank, and gathered parameters.
        gradients: sets of gradients, and buffers of messages.
        optimizer: state of the optimizer.
        activations: tensors for the backward of the microbatches in progress.
    """

    base: float
    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Peak memory of a step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, float]:
        """Return all parts and the total."""
        return {**asdict(self), "total": self.total}


def bubble_share(stages: int, microbatches: int) -> float:
    """Return the share of the time that a rank of a pipeline of equal stages waits, under `gpipe` and `1f1b`.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
    """
    return (stages - 1) / (microbatches + stages - 1)


def gradient_sets(microbatches: int, *, is_exact: bool) -> int:
    """Return the largest number of sets of gradients that a rank holds at a time."""
    levels = 1 + math.ceil(math.log2(microbatches))
    return levels if is_exact else min(2, levels)


def bucket_sizes(gradients: Sequence[int], bucket: float = _BUCKET) -> list[int]:
    """Return the bytes of the buckets of DDP, which hold the gradients in reverse order."""
    sizes = [0]
    for size in reversed(gradients):
        sizes[-1] += size
        if sizes[-1] >= (_FIRST_BUCKET if len(sizes) == 1 else bucket):
            sizes.append(0)
    return [size for size in sizes if size]


@dataclass(frozen=True)
class LayoutModel:
    """Model of the layouts of one recipe.

    Attributes:
        calibration: measurements on this machine.
        cluster: devices and links.
        is_exact: `reduction: exact` of the recipe.
        recipe_microbatches: microbatches of a global batch.
    """

    calibration: Calibration
    cluster: Cluster
    is_exact: bool
    recipe_microbatches: int

    def step_time(self, layout: Layout) -> StepTime:
        """Return the time of a step of a layout."""
        if layout.shape.pipeline > 1:
            return self._pipeline_time(layout)
        shape, calibration = layout.shape, self.calibration
        slowdown = self._slowdown(layout)
        update = calibration.update * slowdown * self._held_share(layout)
        count = layout.microbatches
        seconds = calibration.step_seconds(count)
        if shape.size > 1 and count > 1:
            # The last microbatch is not computed together with the others: its backward overlaps the reduction.
            seconds = calibration.step_seconds(count - 1) + calibration.step_seconds(1) - calibration.update
        compute = (seconds - calibration.update) * slowdown * self._tensor_factor(layout)
        communication = self._statistics(layout) + self._tensor_messages(layout)
        if shape.shard > 1:
            communication += self._shard_messages(layout)
        elif shape.replicate > 1:
            communication += self._gradient_messages(layout, compute / count)
        if shape.replicate > 1 and shape.shard == 1:
            communication += calibration.overheads.get("ddp", 0.0) * slowdown
        return StepTime(compute, update, max(0.0, communication))

    def correction(self, layout: Layout) -> float:
        """Return the measured time of a step of a layout relative to the predicted one; 1 without a measurement."""
        measured = self.calibration.measured.get(layout.name)
        return 1.0 if measured is None else measured / self.step_time(layout).total

    def memory(self, layout: Layout) -> Memory:
        """Return the memory of a rank of a layout."""
        shape, calibration, facts = layout.shape, self.calibration, self.calibration.facts
        count, gradients = layout.microbatches, sum(facts.gradients)
        # Libraries, data and workspace of kernels do not depend on the layout.
        whole = facts.parameters + facts.optimizer + gradients + facts.buffers
        fixed = max(0.0, calibration.peak(1) - whole - facts.activations)
        base = fixed + (calibration.rank_bytes if shape.size > 1 and shape.pipeline == 1 else 0)
        # Sums of gradients can use the memory of activations that backward has released.
        together = max(1, count - 1) if shape.size > 1 else count  # DDP computes the last microbatch alone
        more = max(0.0, calibration.peak(together if not shape.splits_model else count) - calibration.peak(1))
        sums = min(more, (gradient_sets(count, is_exact=self.is_exact) - 1) * gradients)
        held = self._held_share(layout)
        parameters, held_gradients = facts.parameters * held, (gradients + sums) * held
        if shape.shard > 1:
            # Two units are gathered at a time; with several microbatches, sums of whole gradients are kept.
            unit = max(facts.units, default=facts.parameters)
            parameters += min(2 * unit, facts.parameters)
            kept = gradients + sums if count > 1 else 0.0
            held_gradients = gradients / shape.shard + kept + unit
        activations = facts.activations * self._tensor_factor(layout)
        if shape.pipeline > 1:
            stages = facts.stages[shape.pipeline]
            in_flight = (min(len(stages) - number, count) for number in range(len(stages)))
            activations *= max(n * stage.share for n, stage in zip(in_flight, stages, strict=True))
        if not shape.splits_model:
            activations += more - sums  # microbatches that are computed together
        return Memory(base, parameters + facts.buffers, held_gradients, facts.optimizer * held, activations)

    def sent_bytes(self, layout: Layout) -> float:
        """Return the bytes of gradients and parameters that a rank sends in a step."""
        shape, size = layout.shape, sum(self.calibration.facts.gradients)
        part = size * self._held_share(layout) * shape.shard
        gathers = 2 * layout.microbatches if shape.shard > 1 else 0
        shards = (gathers + 1) * (shape.shard - 1) / shape.shard * part if shape.shard > 1 else 0.0
        return shards + 2 * (shape.replicate - 1) / shape.replicate * part / shape.shard

    def overhead_units(self, layout: Layout, kind: str) -> int:
        """Return the number of times that the overhead of a kind of strategy occurs in a step."""
        facts, count = self.calibration.facts, layout.microbatches
        if kind == "fsdp":
            return count * max(1, len(facts.units))
        if kind == "tp" and facts.tensor is not None:
            return count * (len(facts.tensor.reduced_bytes) + len(facts.tensor.gathered_bytes))
        return _stage_message_count(layout) if kind == "pp" else 1

    def _slowdown(self, layout: Layout) -> float:
        return self.calibration.slowdown_of(min(layout.shape.size, self.cluster.devices_per_node))

    def _held_share(self, layout: Layout) -> float:
        """Return the share of parameters and optimizer state that a rank holds."""
        shape, facts = layout.shape, self.calibration.facts
        share = 1.0
        if shape.tensor > 1 and facts.tensor is not None and facts.parameters:
            divided = facts.tensor.parameter_bytes / facts.parameters
            share = 1 - divided * (1 - 1 / shape.tensor)
        if shape.pipeline > 1:
            largest = max(stage.parameter_bytes for stage in facts.stages[shape.pipeline])
            share *= largest / max(1, facts.parameters)
        return share / shape.shard

    def _tensor_factor(self, layout: Layout) -> float:
        tensor, ranks = self.calibration.facts.tensor, layout.shape.tensor
        return 1.0 if tensor is None or ranks == 1 else 1 - tensor.share * (1 - 1 / ranks)

    def _axis(self, layout: Layout, name: str) -> Axis:
        """Return an axis of the mesh; `data` for all ranks with different data."""
        shape = layout.shape
        inner = {"tensor": 1, "shard": shape.tensor, "data": shape.tensor}
        inner |= {"replicate": shape.tensor * shape.shard, "pipeline": shape.tensor * shape.data_size}
        size = shape.data_size if name == "data" else getattr(shape, name)
        return self.cluster.axis(size, inner[name])

    def _all_reduce(self, axis: Axis, size: float) -> float:
        return axis.exact_all_reduce(size) if self.is_exact else axis.fast_all_reduce(size)

    def _statistics(self, layout: Layout) -> float:
        return self._axis(layout, "data").exact_all_reduce(_STATISTICS_BYTES)

    def _hides_messages(self, layout: Layout) -> bool:
        """Whether messages and computation do not share a processor."""
        cores, per_node = self.calibration.cores, min(layout.shape.size, self.cluster.devices_per_node)
        return cores is None or cores >= 2 * per_node

    def _gradient_messages(self, layout: Layout, microbatch: float) -> float:
        """Return the time of the sums of gradients that the backward of one microbatch does not hide."""
        axis, bucket = self._axis(layout, "replicate"), layout.strategy.bucket_mb
        held = self._held_share(layout)
        sizes = bucket_sizes(self.calibration.facts.gradients, bucket * 2**20 if bucket else _BUCKET)
        seconds = [self._all_reduce(axis, size * held) for size in sizes]
        total = sum(seconds)
        if not self._hides_messages(layout) or not seconds:
            return total
        return max(seconds[-1], total - _BACKWARD * microbatch)  # the last bucket is ready at the end of backward

    def _shard_messages(self, layout: Layout) -> float:
        """Return the time of gathered parameters and of scattered sums of FSDP."""
        facts, count = self.calibration.facts, layout.microbatches
        axis, copies = self._axis(layout, "shard"), self._axis(layout, "replicate")
        per_node, held = self.cluster.devices_per_node, self._held_share(layout) * layout.shape.shard
        gather = axis
        if axis.nodes == 1 and self.calibration.gathers:
            link = at_level(self.calibration.gathers, min(layout.shape.size, per_node))
            gather = Axis(axis.size, axis.local, link, link)
        unit_seconds = self.calibration.overheads.get("fsdp", 0.0) * self._slowdown(layout)
        seconds = 0.0
        for number, unit in enumerate(facts.units):
            gathers = 1 if number == len(facts.units) - 1 else 2  # parameters of the root stay for backward
            seconds += count * (gathers * gather.all_gather(unit * held) + unit_seconds)
            seconds += axis.all_gather(unit * held) + self._all_reduce(copies, unit * held / layout.shape.shard)
        return seconds

    def _tensor_messages(self, layout: Layout) -> float:
        tensor, shape = self.calibration.facts.tensor, layout.shape
        if tensor is None or shape.tensor == 1:
            return 0.0
        axis = self._axis(layout, "tensor")
        seconds = sum(axis.exact_all_reduce(size) for size in tensor.reduced_bytes)
        seconds += sum(axis.all_gather(size) for size in tensor.gathered_bytes)
        messages = len(tensor.reduced_bytes) + len(tensor.gathered_bytes)
        overhead = messages * self.calibration.overheads.get("tp", 0.0) * self._slowdown(layout)
        return layout.microbatches * (seconds + overhead)

    def _pipeline_time(self, layout: Layout) -> StepTime:
        shape, calibration, count = layout.shape, self.calibration, layout.microbatches
        stages = calibration.facts.stages[shape.pipeline]
        slowdown, single = self._slowdown(layout), calibration.step_seconds(1) - calibration.update
        microbatch = single * self._tensor_factor(layout)
        largest = max(stage.share for stage in stages)
        # While a pipeline fills, few ranks compute, without the slowdown of a busy machine; together they are not
        # faster than the machine.
        filled = (1 + (count - 1) * largest) * microbatch
        compute = max(filled, count * microbatch * slowdown / shape.pipeline)
        busy = count * largest * microbatch
        update = calibration.update * slowdown * self._held_share(layout)
        communication = self._stage_messages(layout, stages) + self._statistics(layout) + self._tensor_messages(layout)
        if shape.replicate > 1:
            communication += self._gradient_messages(layout, microbatch / shape.pipeline)
        return StepTime(min(busy, compute), update, max(0.0, communication), max(0.0, compute - busy))

    def _stage_messages(self, layout: Layout, stages: Sequence[Stage]) -> float:
        shape, calibration = layout.shape, self.calibration
        axis = self._axis(layout, "pipeline")
        link = axis.slowest
        if axis.nodes == 1 and calibration.messages:
            link = at_level(calibration.messages, min(shape.size, self.cluster.devices_per_node))
        size = max(stage.sent_bytes for stage in stages)
        overhead = Link(calibration.overheads.get("pp", 0.0) * self._slowdown(layout), 0.0)
        messages = _stage_message_count(layout)
        return link.seconds(size * messages, messages) + overhead.seconds(0, messages)


def _stage_message_count(layout: Layout) -> int:
    """Return the number of messages, forward and backward, between two stages that follow each other in a step."""
    return 2 * (layout.microbatches + layout.shape.pipeline - 2)
