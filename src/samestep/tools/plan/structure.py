"""Sizes of a model, and its divisions under FSDP, tensor and pipeline parallelism."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from samestep.config import Recipe, StrategyConfig, resolve_mesh
from samestep.data.batch import tensors_of
from samestep.distributed.world import World
from samestep.engine.batch_norm_checks import uses_batch_statistics
from samestep.engine.compatible_options import require_compatible
from samestep.errors import InputError
from samestep.recipes.builder import Built
from samestep.strategies.fsdp import shard_units
from samestep.strategies.pipeline.partition import Partition, partition_model
from samestep.strategies.pipeline.schedule import stage_count
from samestep.strategies.tensor_parallel import slice_count
from samestep.strategies.tensor_plan import HEADS, divided_dims, resolve_plan
from samestep.tools.plan.calibration import ModelFacts, Stage, TensorPlan

_STEPS = 3  # steps in which the forwards of modules are timed


@dataclass
class _Calls:
    """Forwards of one module: seconds, and bytes of inputs and outputs of the last one."""

    seconds: float = 0.0
    began: float = 0.0
    inputs: int = 0
    outputs: int = 0


@dataclass
class _Divisions:
    """Divisions that the strategies use, and reasons against strategies by their number."""

    reasons: dict[int, str] = field(default_factory=dict)
    partitions: dict[int, Partition] = field(default_factory=dict)
    tensor_plan: dict[str, str] = field(default_factory=dict)


def model_facts(built: Built, recipe: Recipe, strategies: Sequence[StrategyConfig], devices: int) -> ModelFacts:
    """Return the sizes and divisions of the model of a recipe with one engine on one rank."""
    model, optimizer = built.engine.model, built.engine.optimizer
    divisions = _divide(model, recipe, strategies, devices, built.engine.world.device)
    watched = {name for partition in divisions.partitions.values() for name in partition.module_stages}
    batches = list(islice(built.train.endless(), _STEPS))
    with _timed_forwards(model, {"", *watched, *divisions.tensor_plan}) as calls:
        for batch in batches:
            built.engine.step(batch)
    with _saved_tensors(model) as saved:
        built.engine.step(batches[0])
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    parameters = list(model.parameters())
    units = [_bytes(unit.parameters()) for unit in shard_units(model)]
    root = _bytes(parameters) - sum(units)
    return ModelFacts(
        parameters=_bytes(parameters),
        gradients=tuple(_bytes([parameter]) for parameter in parameters if parameter.requires_grad),
        buffers=_bytes(model.buffers()),
        optimizer=_bytes(state),
        activations=sum(saved.values()),
        units=(*units, root) if root else tuple(units),
        stages={ranks: _stages(model, partition, ranks, calls) for ranks, partition in divisions.partitions.items()},
        tensor=_tensor_plan(model, divisions.tensor_plan, calls) if divisions.tensor_plan else None,
        reasons=divisions.reasons,
    )


def _divide(
    model: nn.Module, recipe: Recipe, strategies: Sequence[StrategyConfig], devices: int, device: torch.device
) -> _Divisions:
    """Check each strategy on the model, with the checks of a run."""
    result = _Divisions()
    sync_batch_norm = recipe.step.batch_norm == "sync" and uses_batch_statistics(model)
    for number, strategy in enumerate(strategies):
        shape = resolve_mesh(strategy, devices)
        world = World(0, devices, device, strategy=strategy)
        try:
            require_compatible(recipe.step, world, model, sync_batch_norm=sync_batch_norm)
            if shape.tensor > 1:
                slices = slice_count(recipe.step, shape.tensor)
                result.tensor_plan = resolve_plan(model, recipe.step.tensor_plan, slices)
            if shape.pipeline > 1 and shape.pipeline not in result.partitions:
                count = stage_count(strategy, shape.pipeline)
                result.partitions[shape.pipeline] = partition_model(model, strategy.stages, count)
        except InputError as error:
            result.reasons[number] = error.value
    return result


@contextmanager
def _timed_forwards(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, _Calls]]:
    calls: dict[str, _Calls] = {}
    modules, handles = dict(model.named_modules()), []

    def begin(record: _Calls, module: nn.Module, arguments: Any) -> None:
        record.began, record.inputs = time.perf_counter(), _bytes(tensors_of(arguments))

    def end(record: _Calls, module: nn.Module, arguments: Any, outputs: Any) -> None:
        record.seconds += time.perf_counter() - record.began
        record.outputs = _bytes(tensors_of(outputs))

    for name in names:
        if name in modules:
            record = calls[name] = _Calls()
            handles.append(modules[name].register_forward_pre_hook(partial(begin, record)))
            handles.append(modules[name].register_forward_hook(partial(end, record)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _saved_tensors(model: nn.Module) -> Iterator[dict[int, int]]:
    """Record the bytes of the memory that tensors for backward occupy, by address; parameters and buffers excluded."""
    held = {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _stages(model: nn.Module, partition: Partition, ranks: int, calls: Mapping[str, _Calls]) -> tuple[Stage, ...]:
    """Return the stages of each rank; a rank with several stages counts as one."""
    sizes, seconds, sent = [0] * ranks, [0.0] * ranks, [0] * ranks
    for name, parameter in model.named_parameters():
        for rank in {stage % ranks for stage in partition.parameter_stages[name]}:
            sizes[rank] += _bytes([parameter])
    first = dict[int, str]()
    for name, stage in partition.module_stages.items():
        first.setdefault(stage, name)
        if name in calls:
            seconds[stage % ranks] += calls[name].seconds
    for stage, name in first.items():
        if stage and name in calls:
            sent[(stage - 1) % ranks] = calls[name].inputs
    total = sum(seconds) or 1.0
    return tuple(
        Stage(size, time / total, sent_bytes) for size, time, sent_bytes in zip(sizes, seconds, sent, strict=True)
    )


def _tensor_plan(model: nn.Module, plan: Mapping[str, str], calls: Mapping[str, _Calls]) -> TensorPlan:
    modules = dict(model.named_modules())
    outer = [name for name in plan if not any(name.startswith(f"{other}.") for other in plan)]
    seconds = sum(calls[name].seconds for name in outer if name in calls)
    divided = 0
    reduced, gathered = [], []
    for name, kind in plan.items():
        if kind == HEADS:
            continue
        keys = divided_dims(modules[name], kind)
        divided += _bytes(modules[name].get_parameter(key) for key in keys if getattr(modules[name], key) is not None)
        record = calls.get(name, _Calls())
        reduced.append(record.outputs if kind == "row" else record.inputs)
        if kind == "column_gathered":
            gathered.append(record.outputs)
    return TensorPlan(divided, min(1.0, seconds / (calls[""].seconds or 1.0)), tuple(reduced), tuple(gathered))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
