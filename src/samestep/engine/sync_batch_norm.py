"""Batch norm layers with statistics of the whole global batch, on any device, and the exchange of these statistics.

Ioffe & Szegedy, "Batch Normalization" (2015). Moments of microbatches are combined as in Chan, Golub & LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from samestep.distributed.devices import is_accelerator
from samestep.distributed.local_sockets import LocalSockets
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.microbatches import owned_microbatches, rank_count
from samestep.reduce.tree import MicrobatchTree

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_DONE = 1  # 0 is a microbatch without samples
_HEADER = 3  # code, count, and exchanges before a reading


@dataclass(frozen=True)
class Message:
    """Contribution of one microbatch.

    `combine` is the same function in all messages of an exchange: from counts `(V, 1)` and values `(V, n)` of all
    microbatches to the result for every microbatch.
    """

    layer: int  # number of the norm layer
    direction: Direction
    count: int  # values per channel
    values: torch.Tensor  # sums over these values, float64, one-dimensional
    combine: Callable[[torch.Tensor, torch.Tensor], Any]

    @property
    def code(self) -> int:
        """Layer and direction as one number."""
        return _DONE + 1 + 2 * self.layer + _DIRECTIONS.index(self.direction)


# Writes the tensors of all ranks with samples to the rows of the second argument, in the order of ranks.
AllGather = Callable[[torch.Tensor, torch.Tensor], None]


class AllGathers:
    """All-gathers of batch statistics; creation is a collective of all ranks."""

    def __init__(self, world: World) -> None:
        self._world, self._sockets = world, world.connect()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def between_ranks_of(self, tree: MicrobatchTree) -> AllGather | None:
        """Return the all-gather of the ranks with samples in `tree`, None if there is one such rank; a collective."""
        ranks = tuple(rank for rank, cover in enumerate(tree.covers(self._world.shares)) if cover)
        if len(ranks) == 1:
            return None
        if self._sockets is not None:
            return partial(self._by_sockets, self._sockets, ranks)
        if ranks not in self._groups:
            # On CPUs, a thread reduces gradients at the same time, so that messages need a group of their own. The
            # collectives of an accelerator are issued by one thread, and all ranks issue them in the same order.
            is_default = len(ranks) == self._world.size and is_accelerator(self._world.device)
            self._groups[ranks] = None if is_default else dist.new_group(list(ranks), timeout=self._world.timeout)
        return partial(self._by_backend, self._groups[ranks])

    def _by_sockets(self, sockets: LocalSockets, ranks: Sequence[int], own: torch.Tensor, rows: torch.Tensor) -> None:
        with self._world.context.status.waiting("an all-gather of batch statistics"):
            sockets.all_gather(own, rows, ranks)

    def _by_backend(self, group: dist.ProcessGroup | None, own: torch.Tensor, rows: torch.Tensor) -> None:
        gather = partial(dist.all_gather, list(rows), own, group=group)
        self._world.run_collective(gather, "an all-gather of batch statistics")


class Exchanging(Protocol):
    """Computation of one microbatch, as a norm layer uses it."""

    def exchange(self, message: Any) -> Any:
        """Contribute `message` to an exchange of all microbatches, and return its result."""


class StatisticsExchange:
    """The exchanges of one step on one rank.

    Each exchange is one all-gather with as many elements as the widest layer needs: if microbatches of different ranks
    were at different layers, the backend would otherwise fail or wait forever.

    The host reads codes, counts and flags together at the end of a step, so that it does not wait for the device at
    every layer. Until then a rank relies on the plan: the codes of its last complete step. At a code that is not in the
    plan, it reads at once. If the codes of ranks differ, it takes part in exchanges until the others read, too.

    Args:
        world: all ranks.
        all_gather: between the ranks with samples; None if this rank alone has samples.
        tree: the microbatches.
        microbatches: those of this rank.
        layers: names of the norm layers.
        width: number of values of the widest message.
        plan: `codes` of the last complete step of this rank; empty if there is none.

    Attributes:
        codes: codes of the exchanges of this rank.
        bad: microbatches with non-finite values in the first exchange that had any.
        bad_direction: direction of that exchange; None if all values were finite.
        has_other_ranks: several ranks have samples.
    """

    def __init__(
        self,
        world: World,
        all_gather: AllGather | None,
        tree: MicrobatchTree,
        microbatches: Sequence[int],
        layers: Sequence[str],
        width: int,
        plan: Sequence[int] = (),
    ) -> None:
        self._world, self._all_gather, self._tree = world, all_gather, tree
        self.has_other_ranks = all_gather is not None
        self._microbatches, self._layers, self._width = microbatches, layers, width
        self._plan, self._follows_plan = plan, True
        owned = (owned_microbatches(tree.microbatches, world.shares, rank) for rank in range(rank_count(world.shares)))
        by_rank = [[number for number in numbers if tree.has_samples((number, number + 1))] for numbers in owned]
        self._by_rank = [numbers for numbers in by_rank if numbers]  # microbatches of each rank with samples
        self._most = max(map(len, self._by_rank))
        self._has_all_rows = len(self._by_rank) * self._most == sum(map(len, self._by_rank)) == tree.microbatches
        self._unread: list[torch.Tensor] = []  # codes, counts, exchanges before a reading, and flags
        self.codes: list[int] = []
        self.bad: list[int] = []
        self.bad_direction: Direction | None = None

    def __call__(self, messages: Sequence[Message | None]) -> Any:
        """Return the combined result of one exchange of `messages`, one per microbatch of this rank; None if finished.

        Raises:
            InputError: the microbatches of all ranks are not at the same layer, or a layer receives one value.
            PeerLostError: another rank ended.
        """
        codes = [_DONE if message is None else message.code for message in messages]
        position, code = len(self.codes), codes[0]
        self.codes.append(code)
        is_planned = self._plan[position : position + 1] == [code] and len(set(codes)) == 1
        self._follows_plan = self._follows_plan and is_planned
        rows = self._gather(codes, messages, self._exchanges_before_reading())
        if self._is_reading(code) or not self._follows_plan:
            self._check()
        first = messages[0]
        if first is None:
            return None
        return first.combine(rows[:, 1:2], rows[:, _HEADER : _HEADER + len(first.values)])

    def _gather(self, codes: Sequence[int], messages: Sequence[Message | None], remaining: int) -> torch.Tensor:
        """Return the rows of all microbatches; zeros for those without samples."""
        own = torch.zeros(self._most, _HEADER + self._width, dtype=torch.float64, device=self._world.device)
        counts = [0 if message is None else message.count for message in messages]
        header = [[code, count, remaining] for code, count in zip(codes, counts, strict=True)]
        own[: len(header), :_HEADER].copy_(torch.tensor(header), non_blocking=True)
        for row, message in zip(own, messages, strict=False):
            if message is not None:
                row[_HEADER : _HEADER + len(message.values)] += message.values  # added: -0.0 becomes 0.0
        gathered = own.new_empty(len(self._by_rank), *own.shape)
        if self._all_gather is None:
            gathered[0].copy_(own)
        else:
            self._all_gather(own, gathered)
        rows = self._by_microbatch(gathered)
        non_finite = (~torch.isfinite(rows)).any(dim=1)
        self._unread.append(torch.cat([rows[:, :_HEADER].T, non_finite.double().unsqueeze(0)]))
        return rows

    def _by_microbatch(self, gathered: torch.Tensor) -> torch.Tensor:
        if self._has_all_rows:
            return gathered.flatten(0, 1)
        rows = gathered.new_zeros(self._tree.microbatches, gathered.shape[-1])
        for rank, numbers in enumerate(self._by_rank):
            for row, number in enumerate(numbers):
                rows[number].copy_(gathered[rank, row])
        return rows

    def end_of_forward(self, compute: Callable[..., Any]) -> Message:
        """Return the message with which a microbatch receives the result of `compute` after all forwards."""
        values = torch.empty(0, dtype=torch.float64, device=self._world.device)
        return Message(len(self._layers), "forward", 0, values, compute)

    def _is_reading(self, code: int) -> bool:
        """Whether every rank reads at this code: at the end of a step, and before other collectives."""
        return code == _DONE or (code - _DONE - 1) // 2 == len(self._layers)

    def _exchanges_before_reading(self) -> int:
        """Return the number of further exchanges of this rank until it reads."""
        rest = self._plan[len(self.codes) - 1 :] if self._follows_plan else []
        return next((number for number, code in enumerate(rest) if self._is_reading(code)), 0)

    def _check(self) -> None:
        unread, self._unread = torch.stack(self._unread), []
        with self._world.context.status.waiting("batch statistics"):
            exchanges = unread.tolist()
        remaining = int(max(exchanges[-1][2]))
        filled = [number for number in range(self._tree.microbatches) if self._tree.has_samples((number, number + 1))]
        for codes_row, counts, _, flags in exchanges:
            codes = {microbatch: int(codes_row[microbatch]) for microbatch in filled}
            error = self._error(codes, sum(counts))
            if error is not None:
                for _ in range(remaining):  # the ranks that have not read yet expect them
                    self._gather([_DONE] * len(self._microbatches), [None] * len(self._microbatches), 0)
                raise error
            if self.bad_direction is None and any(flags):
                self.bad = [microbatch for microbatch in filled if flags[microbatch]]
                self.bad_direction = _DIRECTIONS[codes[filled[0]] % 2]

    def _error(self, codes: dict[int, int], count: float) -> InputError | None:
        """Return the error of an exchange, from the code of each microbatch and the number of values per channel."""
        one, code = next(iter(codes.items()))
        other = next((microbatch for microbatch in codes if codes[microbatch] != code), None)
        if other is not None:
            return InputError(
                f"microbatch {one} {self._location(code)} while microbatch {other} {self._location(codes[other])}",
                expected="under batch_norm: sync every microbatch calls the same norm layers in the same order",
                fix="make the order of norm layers independent of the data, or set batch_norm: microbatch",
                code="E_BATCH_NORM",
            )
        layer, direction = divmod(code - _DONE - 1, 2)
        if self._is_reading(code) or direction or count > 1:
            return None
        return InputError(
            f"the norm layer {self._layers[layer]!r} receives one value per channel from the whole global batch",
            expected="batch statistics need at least two values per channel",
            fix="set a larger batch_size, or one that leaves no single sample for the last batch",
            code="E_BATCH_NORM",
        )

    def _location(self, code: int) -> str:
        if code == _DONE:
            return "is done"
        layer, direction = divmod(code - _DONE - 1, 2)
        if layer == len(self._layers):
            return "is at the end of its forward"
        return f"is at the {_DIRECTIONS[direction]} of the norm layer {self._layers[layer]!r}"


_POSITION = "_samestep_position"


class LayerPosition(NamedTuple):
    """Norm layer in the computation of one microbatch."""

    number: int  # among the model's norm layers
    name: str
    microbatch: Exchanging


class Moments(NamedTuple):
    """Statistics per channel over all microbatches, in the precision of their use."""

    mean: torch.Tensor
    variance: torch.Tensor
    unbiased: torch.Tensor


def norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norm layers of a model by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


@contextmanager
def synchronized_layers(model: nn.Module, microbatch: Exchanging) -> Iterator[None]:
    """Make the norm layers of `model` use statistics of all microbatches; `microbatch` is that of the model.

    Raises:
        InputError: the forward of a layer was replaced.
    """
    layers = norm_layers(model)
    kinds: dict[str, Any] = {name: type(layer) for name, layer in layers.items()}
    try:
        for number, (name, layer) in enumerate(layers.items()):
            if "forward" in vars(layer):
                raise _unsupported_layer(name, layer)
            layer.__class__ = _synchronized_class(kinds[name])
            vars(layer)[_POSITION] = LayerPosition(number, name, microbatch)
        yield
    finally:
        for name, layer in layers.items():
            layer.__class__ = kinds[name]
            vars(layer).pop(_POSITION, None)


def sync_batch_norm(
    position: LayerPosition,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` with statistics of all microbatches in training."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    kind = torch.float64 if input.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        count, values = _moments(input, kind)
        combine = partial(_combine_moments, kind)
        moments: Moments = position.microbatch.exchange(Message(position.number, "forward", count, values, combine))
        for running, now in ((running_mean, moments.mean), (running_var, moments.unbiased)):
            if running is not None:
                running.copy_(momentum * now.to(running.dtype) + (1 - momentum) * running)
    outputs: torch.Tensor = _Normalize.apply(input, weight, bias, moments, eps, position)  # type: ignore[no-untyped-call]
    return outputs


class _SyncBatchNormMode(TorchFunctionMode):
    """Replace the batch statistics of a norm layer's forward; momentum and counters stay the layer's."""

    def __init__(self, position: LayerPosition) -> None:
        super().__init__()
        self._position = position
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.called = True
        return sync_batch_norm(self._position, *args, **(kwargs or {}))


@cache
def _synchronized_class(kind: Any) -> Any:
    """Return the synchronized subclass of a norm layer's class.

    A subclass, because a function assigned to the layer would create a reference cycle.
    """
    # SyncBatchNorm's forward raises on CPUs, and communicates by itself.
    base: Any = _BatchNorm if kind.forward is nn.SyncBatchNorm.forward else kind

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        position: LayerPosition = vars(self)[_POSITION]
        if input.shape[1] != self.num_features:
            raise InputError(
                f"the norm layer {position.name!r} of {self.num_features} channels received {input.shape[1]}",
                expected="batch norm has one mean and variance per channel",
                fix="construct the layer with the number of channels of its input",
                code="E_BATCH_NORM",
            )
        with _SyncBatchNormMode(position) as mode:
            outputs: torch.Tensor = base.forward(self, input)
        if self.training and not mode.called:
            raise _unsupported_layer(position.name, self)
        return outputs

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _unsupported_layer(name: str, layer: nn.Module) -> InputError:
    return InputError(
        f"the norm layer {name!r} ({type(layer).__name__}) does not call torch's batch norm",
        expected="under batch_norm: sync norm layers call torch.nn.functional.batch_norm",
        fix="use torch.nn.BatchNorm1d, 2d or 3d, or set batch_norm: microbatch",
        code="E_BATCH_NORM",
    )


class _Normalize(torch.autograd.Function):
    """Normalise one microbatch by the moments of all microbatches; the backward exchanges sums of gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        position: LayerPosition,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.moments, ctx.eps, ctx.position = moments, eps, position
        ctx.bias_type = None if bias is None else bias.dtype
        kind = moments.mean.dtype
        scale, shift = (None if affine is None else affine.to(kind) for affine in (weight, bias))
        return functional.batch_norm(inputs, moments.mean, moments.variance, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        moments, eps, kind = ctx.moments, ctx.eps, ctx.moments.mean.dtype
        data, slope = inputs.to(kind), gradient.to(kind)
        # Sums of dy * xhat and of dy per channel: the affine gradients of torch's backward with fixed moments.
        mean, variance, ones = moments.mean, moments.variance, torch.ones_like(moments.mean)
        none = mean.new_empty(0)  # CUDA's kernel without a gradient of the inputs refuses None; both are not read
        _, dot, total = torch.ops.aten.native_batch_norm_backward(
            slope, data, ones, mean, variance, none, none, False, eps, [False, True, True]
        )
        by_weight = dot.to(weight.dtype) if ctx.needs_input_grad[1] else None
        by_bias = total.to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight, by_bias, None, None, None
        count = data.numel() // data.shape[1]
        values = torch.cat([dot, total]).double()
        message = Message(ctx.position.number, "backward", count, values, partial(_mean_slopes, kind))
        mean_dot, mean_slope = ctx.position.microbatch.exchange(message)
        # dx = w / sigma * (dy - mean(dy) - xhat * mean(dy * xhat)); batch norm with fixed moments computes the last two
        # terms.
        by_input = functional.batch_norm(data, mean, variance, -mean_dot, -mean_slope, False, 0.0, eps).add_(slope)
        scale = torch.rsqrt(variance + eps)
        scale = scale if weight is None else scale * weight.to(kind)
        by_input.mul_(_along_channels(scale, data))
        return by_input.to(inputs.dtype), by_weight, by_bias, None, None, None


def _moments(inputs: torch.Tensor, kind: torch.dtype) -> tuple[int, torch.Tensor]:
    """Return the number of values per channel, and means and sums of squared deviations, concatenated."""
    data = inputs.to(kind)
    count = data.numel() // data.shape[1]
    if count == 0:
        return 0, torch.zeros(2 * data.shape[1], dtype=torch.float64, device=data.device)
    others = [dim for dim in range(data.dim()) if dim != 1]
    mean = data.mean(others)
    centred = data - _along_channels(mean, data)
    return count, torch.cat([mean, centred.square_().sum(others)]).double()


def _combine_moments(kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> Moments:
    means, squares = values.chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(dim=0) / count
    squares = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
    return Moments(mean.to(kind), (squares / count).to(kind), (squares / (count - 1)).to(kind))


def _mean_slopes(kind: torch.dtype, counts: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dot, total = (values.sum(dim=0) / counts.sum()).to(kind).chunk(2)
    return dot, total


def _along_channels(vector: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))
