"""Forward and backward of the shards that a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from samestep.data.batch import GlobalBatch, Shard
from samestep.engine.buffers import ShardedBuffers
from samestep.engine.finite import is_finite
from samestep.engine.forward import Forward
from samestep.engine.loss import Loss
from samestep.engine.observer import Observer
from samestep.engine.tally import Tally, read_tally, tally_length, write_tally
from samestep.errors import UnusedParameterError
from samestep.parallel.strategy import Strategy
from samestep.parallel.tree import ShardTree
from samestep.runtime.random_state import preserved_generators
from samestep.runtime.world import World


class ShardGradients:
    """Computes shards one after another; their gradients meet as the strategy has it.

    Args:
        model: the plain one, which the strategy may have wrapped.
        names: the trained parameters in which backward leaves gradients, with the model's names for them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Forward,
        strategy: Strategy,
        buffers: ShardedBuffers,
        scaler: torch.amp.GradScaler,
        names: Mapping[torch.nn.Parameter, str],
        world: World,
        observers: Sequence[Observer],
    ) -> None:
        self._model, self._forward, self._strategy = model, forward, strategy
        self._buffers, self._scaler = buffers, scaler
        self._names, self._world, self._observers = names, world, observers
        self._all_used_in: int | None = None

    def compute(self, batch: GlobalBatch, position: int, *, save: bool) -> Tally:
        """Leave the sum over shards of the gradient in `.grad`, divided by the number of samples.

        Args:
            position: steps done before this one; random states count them.
            save: this rank wants a checkpoint after the step.
        """
        tree = ShardTree(batch.shards, batch.size)
        vectors: dict[int, torch.Tensor] = {}
        length = tally_length(batch.shards, self._buffers.length)
        total = None
        self._buffers.begin()
        with preserved_generators(self._world.device), self._undone_on_failure():
            computed = (*batch.parts, *batch.fillers)
            for part in computed:
                last = part is computed[-1]
                with self._strategy.shard(tree, part.number, last=last):
                    loss = self._shard_loss(batch, part, position)
                    if not part.is_filler:
                        vectors[part.number] = self._vector(batch, part, loss, self._buffers, save)
                    if last:
                        self._world.pulse.arrive(len(batch.parts))
                        total = self._strategy.sum_vectors(tree, vectors, length)
                    self._backward(loss.sum, batch.size)
                    if not self._strategy.sums_late:
                        self._require_used(self._names, part.number)
                if last and self._strategy.sums_late:
                    self._require_used(self._names)
        total = total or self._strategy.sum_vectors(tree, vectors, length)
        self._strategy.finish(tree)
        return read_tally(batch.shards, total.wait())

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Whoever catches what a model raises, and goes on, goes on from before the step."""
        try:
            yield
        except BaseException:
            self._buffers.restore()
            self._strategy.abandon()
            raise

    def _shard_loss(self, batch: GlobalBatch, part: Shard, position: int) -> Loss:
        if part.is_filler or part is not batch.parts[0]:
            self._buffers.restore()
        observers = () if part.is_filler else self._observers
        for observer in observers:
            observer.begin_shard(part)
        outputs, loss = self._forward(self._strategy.module, part, "shard", position)
        for observer in observers:
            observer.end_shard(part, outputs, loss)
        return loss

    def _vector(self, batch: GlobalBatch, part: Shard, loss: Loss, buffers: ShardedBuffers, save: bool) -> torch.Tensor:
        """What one shard tells all ranks."""
        stop = self._world.stop_requested
        vector = write_tally(batch.shards, part.number, loss.sum, loss.count, buffers.read(), stop=stop, save=save)
        return vector.to(self._world.device)

    def bad_losses(self, batch: GlobalBatch, tally: Tally) -> list[int]:
        """The shards that made a loss not finite, in the step that was just computed; the same on every rank."""
        return tally.bad_shards

    def bad_gradients(self, batch: GlobalBatch, position: int) -> list[int] | None:
        """Compute this rank's shards once more, each alone, to see which has a gradient that is not finite.

        None where a gradient is never that of one shard.
        """
        if self._strategy.sums_late:
            return None
        flags = torch.zeros(batch.shards, dtype=torch.float64, device=self._world.device)
        with preserved_generators(self._world.device):
            for part in batch.parts:
                self._buffers.restore()
                _, loss = self._forward(self._model, part, "shard", position)
                gradients = torch.autograd.grad(loss.sum, list(self._names), allow_unused=True)
                flags[part.number] = float(not is_finite([gradient for gradient in gradients if gradient is not None]))
        self._buffers.restore()
        return self._flagged(flags)

    def _flagged(self, flags: torch.Tensor) -> list[int]:
        """The shards that any rank has set a flag for."""
        self._world.all_reduce(flags)
        return [shard for shard, flag in enumerate(flags.tolist()) if flag > 0]

    def _backward(self, loss: torch.Tensor, samples: int) -> None:
        # Dividing here costs nothing and keeps gradients at the scale of a mean, which fp16 needs; the engine
        # corrects by the count, which is known when all shards are done. Both are the same on every rank.
        scaled = self._scaler.scale(loss)
        torch.autograd.backward(scaled, torch.full_like(scaled, 1 / samples))

    def _require_used(self, names: Mapping[torch.nn.Parameter, str], shard: int | None = None) -> None:
        """Refuse parameters that backward of a shard has left without a gradient."""
        unused = [name for parameter, name in names.items() if parameter.grad is None]
        if not unused:
            self._all_used_in = shard
            return
        where, do = "", "freeze them (requires_grad_(False), or model.freeze in a recipe), or use them"
        if shard is not None and self._all_used_in is not None:
            where = f" of shard {shard}, though they did in that of shard {self._all_used_in} before"
            do = "look for a branch of the forward that depends on the data; add what it leaves out with a factor of 0"
        raise UnusedParameterError(
            f"{len(unused)} trained parameters took no part in the loss{where}: {', '.join(unused[:5])}",
            rule="every parameter that requires a gradient gets one from every shard"
            + (f"; here shard {shard} gave none" if shard is not None else ""),
            do=do,
        )
