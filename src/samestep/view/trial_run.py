"""One computation of a trial, of all rows or of a part, on copies of all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_unflatten

from samestep.distributed.rng import generator_state, saved_generators, seed_generators
from samestep.view.division import ComputedWhole
from samestep.view.leaves import flatten
from samestep.view.lockstep import ThreadModes
from samestep.view.operations import Operations
from samestep.view.precision import Precision, converted
from samestep.view.region import Exchange, Region, inside
from samestep.view.slots import ModuleState, ParameterSlots

_SEED = 20260  # of the choices of a trial; never of a rank
_NOISE = 65_537  # numbers that are repeated, since a random number for each parameter takes time
_OTHER_DRAWS = 5  # seed
_ROUNDING = 1e-6  # of running means that are zero but for float32
_LARGE = 1000.0  # times the value of a row
# Change of the rows: masks of a batch with padding, or one row with large values, with other random
# draws.
Change = Literal["masks", "rows"]


class Setting:
    """Shared state of all runs of a trial: the module, its parameters in the trial's precision, and the rows.

    Args:
        module: the module; its slots hold the copies during a run.
        forward: function that computes a call.
        call: leaves of the arguments, and their structure.
        has_rows: leaves of the arguments that are cut.
        batch: rows of the batch.
        dtype: floating-point precision.
        device: device of the module.

    Attributes:
        base: state of the module before the runs.
        rows: number of rows of the whole run.
        parameters: copies of the parameters, moved a little.
        modes: modes of the call.
        has_plain_masks: whether an argument looks like a mask of a batch without padding.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        call: tuple[Sequence[Any], TreeSpec],
        has_rows: tuple[bool, ...],
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.module = module
        self.forward = forward
        self.rows = batch
        self.dtype = dtype
        self.device = device
        self.has_rows = has_rows
        self.grad = torch.is_grad_enabled()
        self.has_plain_masks = False
        self._leaves, self._structure = call
        self._batch = batch
        self._inputs: list[Any] = []
        self._inference = torch.is_inference_mode_enabled()
        self.modes = ThreadModes(device)
        self.base = ModuleState(module)
        # Those of the call that follows, so that it takes the same decisions by chance.
        self._restore_generators = saved_generators(device)
        self._slots = ParameterSlots(module, attributes=True)
        held = self._slots.held()
        if any(is_lazy(tensor) for tensor in self._slots.tensors):
            raise ComputedWhole("has parameters without a shape")
        if any(index not in held for index, _ in enumerate(module.parameters())):
            raise ComputedWhole("has parameters of TorchScript")
        noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(_SEED), dtype=dtype).to(
            device
        )
        self._copies: dict[int, nn.Parameter] = {}
        for index, tensor in enumerate(self._slots.tensors):
            if isinstance(tensor, nn.Parameter):
                self._copies[index] = nn.Parameter(
                    _moved(converted(tensor, dtype), noise), tensor.requires_grad
                )
        self.parameters = list(self._copies.values())
        self._versions = {
            index: 0 if self._inference else copy._version for index, copy in self._copies.items()
        }

    def select(self, rows: int, change: Change | None) -> None:
        """Take some rows of the batch, in another order, as the arguments of the next runs."""
        self.rows = rows
        order = torch.randperm(self._batch, generator=torch.Generator().manual_seed(_SEED))
        index = order[torch.arange(rows) % self._batch]
        self._inputs = []
        for leaf, cut in zip(self._leaves, self.has_rows, strict=True):
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach()
                if cut:
                    value = value[index.to(leaf.device)]
                value = _without_zeros(converted(value, self.dtype))
                other = _other_value(value) if cut else None
                if other is not None:
                    self.has_plain_masks = True
                    if change == "masks":
                        _vary(value, other)
                elif cut and change == "rows" and value.is_floating_point():
                    value[0] *= _LARGE
            self._inputs.append(value)
        if change == "rows":
            seed_generators(_OTHER_DRAWS, self.device)
            self._restore_generators = saved_generators(self.device)

    def require_unwritten(self) -> None:
        """Require that no run has written into a parameter.

        Raises:
            ComputedWhole: one has.
        """
        for index, copy in self._copies.items():
            if not self._inference and copy._version != self._versions[index]:
                raise ComputedWhole("writes into a parameter")

    def begin(self) -> None:
        """Put the module and the generators into their states before a run, with fresh copies of tensors."""
        self.base.restore()
        fresh: list[torch.Tensor] = []
        for index, tensor in enumerate(self._slots.tensors):
            copy = self._copies.get(index)
            fresh.append(_without_zeros(converted(tensor, self.dtype)) if copy is None else copy)
        self._slots.put(fresh)
        self._restore_generators()

    def arguments(self, start: int, stop: int) -> tuple[Any, dict[int, torch.Tensor]]:
        """Return the (arguments, options) of a run, and the inputs that require gradients, by number of the leaf."""
        copies: dict[
            int, torch.Tensor
        ] = {}  # by identity: attention asks whether query and key are one tensor
        wanted: dict[int, torch.Tensor] = {}
        leaves: list[Any] = []
        for number, (leaf, value) in enumerate(zip(self._leaves, self._inputs, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            if id(leaf) not in copies:
                own = value
                if self.has_rows[number]:
                    own = value[start:stop]
                copy = own.clone()
                if leaf.requires_grad and self.grad:
                    wanted[number] = copy.requires_grad_()
                    copy = copy.clone()  # the forward may write into it
                copies[id(leaf)] = copy
            leaves.append(copies[id(leaf)])
        return tree_unflatten(leaves, self._structure), wanted


class Run:
    """One computation, and its effects.

    Attributes:
        own: number of rows.
        span: first row and the row after the last.
        operations: the operations of the forward.
        outputs: leaves of its result.
        structure: structure of its result.
        wanted: inputs that require gradients, by number of the leaf.
        state: buffers and attributes at the end of its last turn.
        generators: states of the generators afterwards.
    """

    def __init__(
        self,
        setting: Setting,
        start: int,
        stop: int,
        draw_factors: Sequence[int | None] = (),
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.own = stop - start
        self.operations = Operations()
        self.outputs: list[Any] = []
        self.structure: TreeSpec | None = None
        self.wanted: dict[int, torch.Tensor] = {}
        self.state = setting.base
        self.generators: tuple[object, ...] = ()
        self._setting = setting
        self.span = (start, stop)
        self._draw_factors = draw_factors
        self._forward = forward or setting.forward
        self._restore_generators: Callable[[], None] | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Install the generators and attributes of this run during the block."""
        if self._restore_generators is None:
            self._setting.begin()
        else:
            self.state.restore()
            self._restore_generators()
        try:
            yield
        finally:
            self.state = self._setting.base.again()
            self._restore_generators = saved_generators(self._setting.device)

    def is_finite(self) -> bool:
        """Whether all outputs are finite."""
        tensors = [leaf for leaf in self.outputs if isinstance(leaf, torch.Tensor)]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def compute(self, exchange: Exchange | None = None) -> None:
        """Compute the rows, as a part of a divided call if there is an exchange with others."""
        setting = self._setting
        region = None
        if exchange is not None:
            region = Region(setting.rows, *self.span, exchange, self._draw_factors)
        self.operations = Operations(region, is_compared=True)
        (arguments, options), self.wanted = setting.arguments(*self.span)
        precision = Precision(setting.dtype, setting.device)
        with setting.modes.installed(), precision, inside(region), self.operations:
            result = self._forward(*arguments, **options)
        self.outputs, self.structure = flatten(result)
        self.generators = generator_state(setting.device)


def _moved(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return a parameter moved by noise of 1 % of its standard deviation, at least 0.0001; 0.01 if all are equal."""
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return value
    scale = 0.01
    if value.numel() > 1:
        deviation = float(value.flatten()[:_NOISE].abs().std())
        if 0 < deviation < float("inf"):
            scale *= max(
                deviation, 0.01
            )  # biases after one step; with less, means after batch norm were rounding
    return value.add_(_repeated(noise, value), alpha=scale)


def _repeated(noise: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return numbers in the shape of a tensor."""
    count = value.numel()
    return noise.to(value.device).repeat(count // len(noise) + 1)[:count].view(value.shape)


def _without_zeros(value: torch.Tensor) -> torch.Tensor:
    """Let a tensor of zeros, or of their rounding, have small numbers that hide no term, and can be compared."""
    if value.is_floating_point() and value.numel() and float(value.abs().max()) < _ROUNDING:
        numbers = min(value.numel(), _NOISE)
        noise = torch.rand(
            numbers, generator=torch.Generator().manual_seed(_SEED), dtype=value.dtype
        )
        value.add_(_repeated(noise, value), alpha=0.01)
    return value


def _other_value(value: torch.Tensor) -> int | None:
    """Return the value for padding if a tensor looks like a mask of rows without padding, otherwise None."""
    if not value.numel() or value.is_complex():
        return None
    if bool((value == 1).all()):
        return 0
    if value.dtype is torch.bool and not bool(value.any()):
        return 1
    return None


def _vary(value: torch.Tensor, other: int) -> None:
    """Let rows of a mask end with different numbers of `other`."""
    for row in range(value.shape[0]):
        if value.dim() > 1 and value.shape[-1] > 2:
            value[row, ..., -1 - row % (value.shape[-1] - 1) :] = other
        elif row % 2:  # too short for different numbers
            value[row, ..., -1:] = other
