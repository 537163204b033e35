"""Forward and backward of a rank's shards at the same time, for norm layers that look at the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.buffers import Modes, ShardedBuffers
from samestep.engine.finite import is_finite
from samestep.engine.gradients import ShardGradients
from samestep.engine.lockstep import Task, Track, run_in_lockstep
from samestep.engine.meeting import Meetings, Members
from samestep.engine.norm import join_layers, norm_layers
from samestep.engine.replica import Replica, replicate, require_untouched
from samestep.engine.tally import Tally, read_tally, tally_length
from samestep.errors import InputError
from samestep.parallel.tree import ShardTree
from samestep.runtime.threads import Threads
from samestep.runtime.world import World


def has_joint_layers(modes: Modes) -> bool:
    """Whether any norm layer uses statistics of the batch when a step trains."""
    return any(isinstance(module, _BatchNorm) and (trains or module.running_mean is None) for module, trains in modes)


def require_whole_model(world: World) -> None:
    """Refuse to compute shards on copies of a model of which this rank has a part.

    Raises:
        InputError: it has.
    """
    if world.layout.is_split:
        raise InputError(
            f"step.batch_norm: sync with the layout {world.layout.name}",
            rule="batch norm over all shards runs copies of the model side by side, each whole",
            do="set step.batch_norm: shard, or --strategy ddp",
        )


class JointGradients(ShardGradients):
    """Computes all shards in lockstep, each on a replica of the model; their gradients meet when all are done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._threads = Threads("samestep-shard")
        self._members = Members(self._world)
        self._meetings: Meetings | None = None

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> Tally:
        tree = ShardTree(batch.shards, batch.size)
        vectors: dict[int, torch.Tensor] = {}
        gradients: dict[int, list[torch.Tensor | None]] = {}

        def shard_of(part: Shard, track: Track) -> None:
            for observer in self._observers:
                observer.begin_shard(part)
            replica = self._replica(track)
            buffers = ShardedBuffers(replica.module)
            outputs, loss = self._forward(replica.module, part, "shard", position)
            for observer in self._observers:
                observer.end_shard(part, outputs, loss)
            vectors[part.number] = self._vector(batch, part, loss, buffers, save)
            aliases = {replica.parameters[parameter]: name for parameter, name in self._names.items()}
            self._backward(loss.sum, batch.size)
            require_untouched(list(self._names))
            self._require_used(aliases, part.number)
            gradients[part.number] = [alias.grad for alias in aliases]

        self._buffers.begin()
        with self._undone_on_failure():
            self._run(tree, batch, shard_of)
            self._world.pulse.arrive(len(batch.parts))
            for part in batch.parts:
                with self._strategy.shard(tree, part.number, last=part is batch.parts[-1]):
                    for parameter, gradient in zip(self._names, gradients.pop(part.number), strict=True):
                        parameter.grad = gradient
        total = self._strategy.sum_vectors(tree, vectors, tally_length(batch.shards, self._buffers.length))
        self._strategy.finish(tree)
        return read_tally(batch.shards, total.wait())

    def bad_losses(self, batch: GlobalBatch, tally: Tally) -> list[int]:
        """The shards at which it began: all others share their statistics, so their losses tell nothing."""
        return self._began(batch, "forward") or tally.bad_shards

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """The shards at which it began; where no norm layer saw it, those whose own gradient is not finite."""
        found = self._began(batch, "backward")
        if found:
            return found
        flags = torch.zeros(batch.shards, dtype=torch.float64, device=self._world.device)

        def shard_of(part: Shard, track: Track) -> None:
            replica = self._replica(track)
            _, loss = self._forward(replica.module, part, "shard", position)
            aliases = [replica.parameters[parameter] for parameter in self._names]
            gradients = torch.autograd.grad(loss.sum, aliases, allow_unused=True)
            present = [gradient for gradient in gradients if gradient is not None]
            flags[part.number] = float(not is_finite(present))

        self._run(ShardTree(batch.shards, batch.size), batch, shard_of)
        return self._flagged(flags)

    def _replica(self, track: Track) -> Replica:
        replica = replicate(self._model)
        join_layers(replica.module, track)
        return replica

    def _run(self, tree: ShardTree, batch: GlobalBatch, shard_of: Callable[[Shard, Track], None]) -> None:
        """Run `shard_of` for each shard of this rank, together with those of the other ranks."""
        group = self._members.group(tree)
        if not batch.parts:
            return
        layers = norm_layers(self._model)
        width = 2 * max(layer.num_features for layer in layers.values())
        shards = [part.number for part in batch.parts]
        self._meetings = Meetings(self._world, group, tree, shards, list(layers), width)
        tasks: list[Task] = [lambda track, part=part: shard_of(part, track) for part in batch.parts]  # type: ignore[misc]
        run_in_lockstep(tasks, self._meetings, self._world.device, self._threads)

    def _began(self, batch: GlobalBatch, direction: str) -> list[int]:
        """The shards whose numbers were not finite when first any were, if that was in this pass."""
        flags = torch.zeros(batch.shards, dtype=torch.float64, device=self._world.device)
        meetings = self._meetings
        if batch.parts and meetings is not None and meetings.bad_direction == direction:
            flags[meetings.bad] = 1
        return self._flagged(flags)
