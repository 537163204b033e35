"""Pipeline parallelism, alone (`pp`) and with replicas (`ddp x pp`): strategy and parameters of this rank's stages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from samestep.config import Reduction as ReductionName
from samestep.config import StepConfig
from samestep.distributed.world import World, all_gather
from samestep.errors import InputError
from samestep.reduce.tree import MicrobatchTree, Node
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.local_parameters import LocalParameters
from samestep.strategies.pipeline.partition import partition_model
from samestep.strategies.pipeline.schedule import stage_count
from samestep.strategies.pipeline.shared_weights import SharedWeights, pipeline_group
from samestep.strategies.pipeline.stages import PipelineStages
from samestep.strategies.reduction import flatten, unflatten
from samestep.strategies.strategy import DeferredStrategy, Sum


def split_into_stages(model: nn.Module, world: World, column_slices: Mapping[str, int]) -> StageParameters:
    """Partition `model` and remove the parameters of other ranks' stages, in place.

    `column_slices` are those of `LocalParameters`.

    Raises:
        InputError: the model cannot be partitioned.
    """
    assert world.mesh is not None
    config, ranks = world.strategy, world.subworld(world.mesh.get_group("pipeline"))
    partition = partition_model(model, config.stages, stage_count(config, ranks.size))
    stages = PipelineStages(model, partition, ranks, config)
    return StageParameters(model, stages, column_slices)


class StageParameters(LocalParameters):
    """Parameters of this rank's stages; those of other stages are on the meta device.

    Attributes:
        stages: of this rank.
        names: trained parameters of this rank's stages.
    """

    _own_axes = ("pipeline",)

    def __init__(self, model: nn.Module, stages: PipelineStages, column_slices: Mapping[str, int]) -> None:
        super().__init__(model, stages.world, column_slices)
        self.stages, self._pipeline = stages, stages.world
        size = self._pipeline.size
        self._ranks = {
            name: tuple(sorted({stage % size for stage in used}))
            for name, used in stages.partition.parameter_stages.items()
        }
        trained = list(self.names.values())
        self._release_other_stages(model)
        self.names = {self.local[name]: name for name in trained if self._is_own(name)}
        self.module_names = {self._in_module[name]: name for name in trained if self._is_own(name)}
        self._counted = [name for name in self._counted if self._ranks[name][0] == self._pipeline.rank]
        self.is_divided = True
        self._trained = trained

    def shared(self, owner: Mapping[str, int]) -> dict[tuple[int, tuple[int, ...]], list[str]]:
        """Return the names of trained parameters that several ranks have, by the owning stage and these ranks."""
        shared: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for name in self._trained:
            if len(ranks := self._ranks[name]) > 1:
                shared.setdefault((owner[name], ranks), []).append(name)
        return shared

    def prepare(self, config: StepConfig) -> None:
        """Compile the stages if configured; refuse shared weights whose gradients autocast adds in one process.

        Raises:
            InputError: there is such a weight.
        """
        cast_stages = self.stages.partition.cast_stages
        names = [name for name in self._trained if len(cast_stages[name]) > 1]
        if config.reduction == "exact" and config.precision != "fp32" and names:
            stages = ", ".join(str(stage + 1) for stage in cast_stages[names[0]])
            raise InputError(
                f"{names[0]} is a factor of products in the stages {stages}, with step.precision {config.precision} "
                "and step.reduction exact",
                expected="one process adds the 16-bit gradients of these products before they become 32-bit gradients: "
                "the products are in one stage",
                fix="set other strategy.stages, step.precision: fp32, or step.reduction: fast",
                code="E_INCOMPATIBLE",
            )
        if config.compile:
            self.stages.compile()  # the model as a whole is never called

    def full_tensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        source, device = self._ranks[name][0], self._pipeline.device
        if self._pipeline.rank == source:
            full = super().full_tensor(name, local.detach()).clone().contiguous()
        else:
            division = self._divisions.get(name)
            is_divided = division is not None and local.dim() == len(division.shape)
            shape = division.shape if division is not None and is_divided else local.shape
            full = torch.empty(shape, dtype=local.dtype, device=device)
        self._pipeline.broadcast(full, source)
        return full

    def position(self, name: str, local: torch.Tensor, world: World) -> tuple[torch.Size, tuple[int, ...]] | None:
        is_first = self._ranks[name][0] == self._pipeline.rank
        return super().position(name, local, world) if is_first else None

    def merge_metadata(self, values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return per-parameter values of all ranks; tensors of other ranks are on the meta device."""
        own = {
            name: {slot: _encode(value) for slot, value in slots.items()}
            for name, slots in values.items()
            if self._pipeline.rank == self._ranks[name][0]
        }
        merged: dict[str, Any] = {}
        for rows in all_gather(own, self._pipeline):
            merged |= rows
        return {
            name: {
                slot: values[name][slot] if name in values else _decode(encoded)
                for slot, encoded in merged[name].items()
            }
            for name in self.local
            if name in merged
        }

    def _combine_stages(self, values: torch.Tensor, operation: Literal["sum", "max"]) -> None:
        self._pipeline.combine(values, operation)

    def _is_own(self, name: str) -> bool:
        return self._pipeline.rank in self._ranks[name]

    def _release_other_stages(self, model: nn.Module) -> None:
        """Replace the parameters of other ranks' stages by meta tensors; buffers of all stages remain."""
        replaced = {}
        for name, parameter in list(self._in_module.items()):
            if not self._is_own(name):
                local = self.local[name]
                self._in_module[name] = replaced[parameter] = _on_meta(parameter.shape, parameter)
                self.local[name] = replaced[parameter] if local is parameter else _on_meta(local.shape, parameter)
        for module in model.modules():
            for name, original in module._parameters.items():
                if original in replaced:
                    module._parameters[name] = replaced[original]


def _on_meta(shape: torch.Size, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=like.dtype, device="meta"), like.requires_grad)


def _encode(value: Any) -> Any:
    """Return an optimizer-state value as JSON: a tensor as dtype and shape, a number unchanged."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
    return value


class PipelineStrategy(DeferredStrategy):
    """Microbatches pass through the stages; then ranks with the same stage sum its gradients.

    The gradients of each microbatch are taken at the end of its backward in a stage and added in the order of the
    reduction. A weight that several stages use belongs to the first of them.

    Attributes:
        stages: of this rank.
        stage_names: trained parameters of each stage of this rank as the model has them, with the model's names.
    """

    defers_gradients = True

    def __init__(
        self, model: nn.Module, local_parameters: StageParameters, reduction: ReductionName, world: World
    ) -> None:
        build = partial(build_reduction, reduction, world.data, hook=world.strategy.hook)
        super().__init__(model, local_parameters, build([]), world)
        self.stages, self._pipeline = local_parameters.stages, local_parameters.stages.world
        used = self.stages.partition.gradient_stages
        modules = {name: parameter for parameter, name in local_parameters.module_names.items()}
        self.stage_names = {
            stage: {p: name for name, p in modules.items() if used[name][0] == stage} for stage in self.stages.own
        }
        self._reductions = {
            stage: build([local_parameters.local[name] for name in of_stage.values()])
            for stage, of_stage in self.stage_names.items()
            if of_stage
        }
        self.stages.shared = SharedWeights(used, modules, local_parameters.trained, self._pipeline, world)
        self._copies = []
        owner = {name: stages[0] for name, stages in used.items()}
        for (stage, ranks), names in sorted(local_parameters.shared(owner).items()):
            group, source = pipeline_group(world, ranks), ranks.index(stage % self._pipeline.size)
            if group is not None:
                self._copies.append(([local_parameters.local[name] for name in names], source, group))

    def end_backward(self, tree: MicrobatchTree, microbatch: int, slot: int, stage: int) -> None:
        """Move the gradients of a microbatch in one stage from `.grad` to the sums of this rank."""
        self._local_parameters.take_gradients()
        self.stages.shared.send(stage, slot)
        if stage in self._reductions:  # a stage can be frozen
            self._reductions[stage].accumulate(tree, microbatch)

    def sum_vectors(self, tree: MicrobatchTree, vectors: Mapping[Node, torch.Tensor], length: int) -> Sum:
        if vectors:
            # Losses are on the last stage's rank, buffers on that of their stage: one summand is non-zero.
            rows = torch.stack(list(vectors.values()))
            self._pipeline.combine(rows)
            vectors = dict(zip(vectors, rows, strict=True))
        return super().sum_vectors(tree, vectors, length)

    def abandon(self) -> None:
        for reduction in self._reductions.values():
            reduction.clear()
        self.stages.shared.clear()
        super().abandon()

    def finish(self, tree: MicrobatchTree) -> None:
        self.stages.shared.finish()
        for reduction in self._reductions.values():
            reduction.set_total(tree)
        for parameters, source, group in self._copies:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = flatten(gradients, parameters)
            self._pipeline.run_collective(
                partial(dist.broadcast, flat, group=group, group_src=source), "a broadcast of shared gradients"
            )
            for parameter, gradient in zip(parameters, unflatten(flat, parameters), strict=True):
                parameter.grad = gradient
