"""One computation of a trial, of all rows or of a part, on converted copies of all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_unflatten

from samestep.distributed.rng import generator_state, saved_generators, seed_generators
from samestep.view.leaves import flatten
from samestep.view.module_tensors import ModuleState, ParameterSlots
from samestep.view.operations import Operations
from samestep.view.region import Exchange, Region, inside
from samestep.view.slice_threads import ThreadModes
from samestep.view.trial_result import ComputedWhole

_SEED = 20260  # of the choices of a trial; never of a rank
_NOISE = 65_537  # numbers that are repeated, since a random number for each parameter takes time
_OTHER_DRAWS = 5  # seed
_ROUNDING = 1e-6  # of running means that are zero but for float32
_LARGE = 1000.0  # times the value of a row
# Change of the rows: masks of a batch with padding, or one row with large values, with other random
# draws.
Change = Literal["masks", "rows"]
_REAL = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_CONVERSIONS: dict[Callable[..., Any], torch.dtype] = {
    **dict.fromkeys(
        (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double),
        torch.float32,
    ),
    **{getattr(torch.Tensor, name): torch.complex64 for name in ("cfloat", "cdouble")},
}
# Functions that take the precision of an array of NumPy.
_FROM_ARRAYS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
# The dtype of a view is the interpretation of its bits.
_UNCHANGED = frozenset({torch.Tensor.view, torch.frombuffer})


class Setting:
    """Shared state of all runs of a trial: the module, its converted parameters, and the rows.

    Args:
        module: the module, whose slots hold the copies during a run.
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
        # Of this thread: parts run in threads of their own.
        self.modes = ThreadModes(device)
        self.base = ModuleState(module)
        # Those of the call that follows, so that it takes the same decisions by chance.
        self._restore_generators = saved_generators(device)
        self._slots = ParameterSlots(module, attributes=True)
        if any(is_lazy(tensor) for tensor in self._slots.tensors):
            raise ComputedWhole("has parameters without a shape")
        noise = torch.randn(_NOISE, generator=_choices(), dtype=dtype).to(device)
        self._copies: dict[int, nn.Parameter] = {}
        for index, tensor in enumerate(self._slots.tensors):
            if isinstance(tensor, nn.Parameter):
                moved = _moved(_converted(tensor, dtype), noise)
                self._copies[index] = nn.Parameter(moved, tensor.requires_grad)
        self.parameters = list(self._copies.values())
        self._versions: list[int] = []
        if not torch.is_inference_mode_enabled():  # tensors of which count no versions
            self._versions = [parameter._version for parameter in self.parameters]

    def select(self, rows: int, change: Change | None) -> None:
        """Take some rows of the batch, in another order, as the arguments of the next runs."""
        self.rows = rows
        order = torch.randperm(self._batch, generator=_choices())
        # A batch with fewer rows than the trial computes is repeated.
        index = order[torch.arange(rows) % self._batch]
        self._inputs = []
        for leaf, cut in zip(self._leaves, self.has_rows, strict=True):
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach()
                if cut:
                    value = value[index.to(leaf.device)]
                value = _without_zeros(_converted(value, self.dtype))
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
        for parameter, version in zip(self.parameters, self._versions, strict=False):
            if parameter._version != version:
                raise ComputedWhole("writes into a parameter")

    def begin(self) -> None:
        """Put the module and the generators into their first states, with new copies of tensors."""
        self.base.restore()
        fresh: dict[torch.Tensor, torch.Tensor] = {}
        for index, tensor in enumerate(self._slots.tensors):
            # Parameters are common to all runs, so that gradients of parts are summed.
            copy: torch.Tensor | None = self._copies.get(index)
            if copy is None:
                copy = _without_zeros(_converted(tensor, self.dtype))
            fresh[tensor] = copy
        for container, key, _, replacement in self._slots.entries(fresh):
            container[key] = replacement
        self._restore_generators()

    def arguments(self, start: int, stop: int) -> tuple[Any, dict[int, torch.Tensor]]:
        """Return (arguments, options) of a run, and inputs that require gradients, by leaf."""
        # By identity: attention asks whether query and key are one tensor.
        copies: dict[int, torch.Tensor] = {}
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
        precision = _Precision(setting.dtype, setting.device)
        # The last mode sees a function first: operations are those of the script.
        with setting.modes.installed(), precision, inside(region), self.operations:
            result = self._forward(*arguments, **options)
        self.outputs, self.structure = flatten(result)
        self.generators = generator_state(setting.device)


def _choices() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _moved(value: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Move a parameter by noise of 1 % of its deviation, at least 0.0001; 0.01 if all are equal."""
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return value
    scale = 0.01
    if value.numel() > 1:
        deviation = float(value.flatten()[:_NOISE].abs().std())
        if 0 < deviation < float("inf"):
            # At least, for biases after one step: with less, means after batch norm are rounding.
            scale *= max(deviation, 0.01)
    return value.add_(_repeated(noise, value), alpha=scale)


def _repeated(noise: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    count = value.numel()
    return noise.to(value.device).repeat(count // len(noise) + 1)[:count].view(value.shape)


def _without_zeros(value: torch.Tensor) -> torch.Tensor:
    """Give a tensor of zeros, or of their rounding, small numbers, which hide no term."""
    if value.is_floating_point() and value.numel() and float(value.abs().max()) < _ROUNDING:
        numbers = min(value.numel(), _NOISE)
        noise = torch.rand(numbers, generator=_choices(), dtype=value.dtype)
        value.add_(_repeated(noise, value), alpha=0.01)
    return value


def _other_value(value: torch.Tensor) -> int | None:
    """Return the value for padding if a tensor looks like a mask without padding, else None."""
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


# --- precision ------------------------------------------------------------------------------------


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy without a graph; numbers that are not integers get the precision of `dtype`."""
    if tensor.is_complex():
        dtype = _COMPLEX[dtype]
    elif not tensor.is_floating_point():
        dtype = tensor.dtype
    return tensor.detach().to(dtype, copy=True)


class _Precision(TorchFunctionMode):
    """Function mode of one precision: conversions to others, also by autocast, have no effect.

    Autocast does not convert tensors of float64. In float32 it is switched off around each
    operation.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._dtype = dtype
        self._device = device.type
        complex_dtypes = (torch.complex32, *_COMPLEX.values())
        self._dtypes = {
            **dict.fromkeys(_REAL, dtype),
            **dict.fromkeys(complex_dtypes, _COMPLEX[dtype]),
        }

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        if function in _CONVERSIONS:
            return arguments[0].to(self._dtypes[_CONVERSIONS[function]])
        if function not in _UNCHANGED:
            arguments = [self._mapped(value) for value in arguments]
            options = {name: self._mapped(value) for name, value in options.items()}
        if self._dtype is torch.float32 and torch.is_autocast_enabled(self._device):
            with torch.autocast(self._device, enabled=False):
                return function(*arguments, **options)
        result = function(*arguments, **options)
        if function in _FROM_ARRAYS and result.dtype in self._dtypes:
            return result.to(self._dtypes[result.dtype])
        return result

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._dtypes.get(value, value)
        return value
