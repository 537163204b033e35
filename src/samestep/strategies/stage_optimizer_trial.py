"""Trial of an optimizer: whether it updates the parameters of a stage without those of others.

In a pipeline, an optimizer sees the parameters of one stage. Adam and SGD need no others. An
optimizer that uses values of all parameters, or draws random numbers, would compute other updates,
which no comparison of ranks finds: their parameters differ anyway. The trial updates small random
tensors, all together and in two halves.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from samestep.distributed.rng import preserved_generators, seed_generators
from samestep.errors import InputError

_SIZE = 4  # largest size of a dimension of the tensors
_STEPS = 2  # the second has state of the first
# Of values near 1: some optimizers keep their state in float32.
_RELATIVE = 1e-5
_ABSOLUTE = 1e-6


def require_update_by_stages(optimizer: Optimizer) -> None:
    """Require that an optimizer computes the same updates without the parameters of other stages.

    Args:
        optimizer: the optimizer, before its first step; it is not changed.

    Raises:
        InputError: the optimizer does not, or cannot be copied for the trial.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    name = type(optimizer).__name__
    device = parameters[0].device
    generator = torch.Generator().manual_seed(0)
    whole: list[torch.Tensor | None] = [
        # float64: a difference is then a dependence, and not rounding.
        torch.randn(
            [min(size, _SIZE) for size in one.shape], generator=generator, dtype=torch.float64
        )
        for one in parameters
    ]
    try:
        with preserved_generators(device):
            expected = _updated(optimizer, parameters, whole, device)
            is_same = True
            for half in range(2):
                part = [one if number % 2 == half else None for number, one in enumerate(whole)]
                found = _updated(optimizer, parameters, part, device)
                is_same &= all(map(_is_close, expected, found))
    except Exception as error:
        raise InputError(
            f"{name} cannot be tried on parts of parameters: {type(error).__name__}: {error}",
            expected="an optimizer with step() without arguments, whose attributes can be copied",
            fix="use an optimizer of torch, such as AdamW, or the strategy ddp or fsdp",
            code="E_OPTIMIZER",
        ) from error
    if not is_same:
        raise InputError(
            f"{name} computes the update of a parameter from other parameters as well, and ranks "
            "have those of their stage",
            expected="under pp, an optimizer that updates each parameter alone",
            fix="use such an optimizer, as AdamW, or the strategy ddp, fsdp or tp",
            code="E_OPTIMIZER",
        )


def _updated(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    device: torch.device,
) -> list[torch.Tensor | None]:
    """Return tensors after steps of a copy of the optimizer; None for those without a gradient."""
    # The same start for the whole and for parts: an optimizer that draws then differs.
    seed_generators(0, device)
    replaced: dict[int, Any] = {}
    updated: list[torch.Tensor | None] = []
    for parameter, tensor in zip(parameters, tensors, strict=True):
        if tensor is None:
            # Of another stage: without a gradient, as after `backward` of a rank.
            replaced[id(parameter)] = torch.nn.Parameter(torch.zeros(parameter.shape))
            updated.append(None)
            continue
        copied = torch.nn.Parameter(tensor.to(device, copy=True))
        # A function of each element: a part has the gradients of the whole.
        copied.grad = copied.detach().cos()
        replaced[id(parameter)] = copied
        updated.append(copied)
    trial = _copy(optimizer, replaced)
    for group in trial.param_groups:
        if "lr" in group:
            group["lr"] = 1.0  # a schedule can begin at zero
    # Without the hooks of steps, which are the script's and Samestep's.
    step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        for _ in range(_STEPS):
            step(trial)
    return updated


def _copy(optimizer: Optimizer, replaced: dict[int, Any]) -> Any:
    """Return a copy with other parameters and without hooks.

    State of the size of a parameter has one value, so that parts have the state of the whole.

    Args:
        optimizer: the optimizer; torch's own copies have no attributes of subclasses.
        replaced: other objects by the `id` of those of the optimizer.
    """
    copied: Any = object.__new__(type(optimizer))
    # Before the attributes, which may refer to the optimizer.
    replaced[id(optimizer)] = copied
    state: dict[Any, Any] = defaultdict(dict)
    for parameter, values in optimizer.state.items():
        small = replaced[id(parameter)]
        state[small] = {name: _state(value, parameter, small) for name, value in values.items()}
    replaced[id(optimizer.state)] = state
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            copied.__dict__[name] = OrderedDict()
        elif isinstance(value, Optimizer) and id(value) not in replaced:
            copied.__dict__[name] = _copy(value, replaced)
        else:
            copied.__dict__[name] = copy.deepcopy(value, replaced)
    return copied


def _state(value: Any, parameter: torch.Tensor, small: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape:
        # Of a DTensor, the part of this rank.
        own = getattr(value, "_local_tensor", value)
        return torch.full_like(small, float(own.flatten()[0]))
    return copy.deepcopy(value)


def _is_close(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None:  # a parameter of another stage
        return True
    return torch.allclose(expected, found, _RELATIVE, _ABSOLUTE)
