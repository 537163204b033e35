"""Parameters of a module as DTensors: in the places of plain ones, gathered, and loaded.

Between calls, the parameters of `fsdp` and `tp` are DTensors.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.config.exclusions import excluded
from samestep.errors import InputError
from samestep.strategies.dtensors import Division, as_divided, gathered, local_part
from samestep.view.module_tensors import ParameterSlots, replaced


class FormerParameters:
    """Parameters of a module before DTensors take their places.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots: ParameterSlots | None = ParameterSlots(module)
        self._places = [
            (part, name, one)
            for part in module.modules()
            for name, one in part._parameters.items()
            if one is not None
        ]
        # Weak: these have the memory of the full parameters.
        self._references: dict[int, weakref.ref[nn.Parameter]] = {}
        # A copy of a divided module has this hook already.
        if _load_full not in module._load_state_dict_pre_hooks.values():
            module.register_load_state_dict_pre_hook(_load_full)

    def replace(self) -> None:
        """Put the DTensors, which are in the tables of parameters, in all other places as well."""
        assert self._slots is not None
        mapping: dict[torch.Tensor, torch.Tensor] = {}
        for part, name, one in self._places:
            present = part._parameters[name]
            if present is None or present is one:
                continue
            mapping[one] = present
            was_known = id(one) in self._references
            self._references[id(one)] = weakref.ref(one)
            if present.requires_grad:
                # Not a weak reference: the parameters of a module with weak ones cannot be moved.
                division = Division.of(cast(DTensor, present))
                present.register_hook(partial(as_divided, division, present.device))
            if not was_known:  # a shared weight has several places
                _move_state(one, present)
        # Lists of parameters, as recurrent layers have.
        for container, key, _, divided in self._slots.entries(mapping):
            container[key] = divided
        self._slots = None
        self._places = []

    def require_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Require that an optimizer has none of these parameters.

        Raises:
            InputError: it was made before the division.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reference = self._references.get(id(parameter))
                # By identity, too: a later object can have the id of a freed one.
                if reference is not None and reference() is parameter:
                    raise InputError(
                        f"{type(optimizer).__name__} has parameters from before samestep.parallel "
                        "divided them",
                        expected="an optimizer of the divided parameters",
                        fix="make the optimizer after samestep.parallel",
                        code="E_OPTIMIZER",
                    )


def _move_state(before: nn.Parameter, after: Any) -> None:
    """Give gradient, hooks and attributes of a parameter to the DTensor in its place."""
    if before.grad is not None:
        after.grad = Division.of(after).divided(before.grad, after.device)
    for name, value in vars(before).items():
        vars(after).setdefault(name, value)
    for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(before, table)
        if hooks:  # the handles of the script have this dictionary
            own = dict(getattr(after, table) or {})
            added = dict(hooks)
            hooks.clear()
            hooks.update(own)
            hooks.update(added)
            setattr(after, table, hooks)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors inside the block that count their versions, and can be written later."""
    has_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(has_gradients):
        yield


@contextmanager
def full_in_places(
    module: nn.Module, full: Callable[[nn.Parameter], torch.Tensor | None], process: int
) -> Iterator[Mapping[Any, torch.Tensor]]:
    """Put full parameters into a module during the block. A collective.

    Args:
        module: the module.
        full: returns the full value of a parameter; None if this rank has it.
        process: process that has the other ranks.

    Yields:
        The full values by parameter.
    """
    if os.getpid() != process:  # the other ranks would wait for a child
        raise excluded("gathers in a child process", type(module).__name__)
    mapping: dict[Any, torch.Tensor] = {}
    with outside_inference_mode(), torch._C._DisableFuncTorch():
        for one in module.parameters():
            value = full(one)
            if value is not None:
                mapping[one] = value
    with replaced(ParameterSlots(module).entries(mapping)):
        yield mapping


def keep_written(full: Mapping[Any, torch.Tensor]) -> None:
    """Give parameters the values that a whole call has written into full ones.

    Args:
        full: full values by parameter that this rank has a part of.
    """
    for one, value in full.items():
        own: torch.Tensor = value.detach()
        if isinstance(one, DTensor):
            own = Division.of(one).divided(own, one.device)
        # Compared by value: `weight.data.mul_` counts no write. Embeddings with `max_norm` write,
        # too. The answers of ranks can differ, so the copy sends nothing.
        if not torch.equal(local_part(own), local_part(one)):
            with torch.no_grad():
                one.copy_(own)


def complete_arguments(arguments: Any) -> Any:
    """Return the arguments of a call with complete tensors: `weight.new_zeros` is divided."""
    if not any(isinstance(leaf, DTensor) for leaf in tree_leaves(arguments)):
        return arguments  # the containers themselves, into which a forward may write
    with torch._C._DisableFuncTorch():
        return tree_map_only(DTensor, gathered, arguments)


def _load_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Divide full tensors of a state dict, so that `load_state_dict` takes those of any layout."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value: Any = state_dict.get(prefix + name)
        is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        # Torch reports a difference of shapes.
        if isinstance(parameter, DTensor) and is_full and value.shape == parameter.shape:
            state_dict[prefix + name] = Division.of(parameter).divided(value, parameter.device)


def count_writes(optimizer: torch.optim.Optimizer) -> None:
    """Let autograd count the writes of a step: torch counts none for lists of DTensors."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            if isinstance(one, DTensor) and one.grad is not None:
                # Private, in torch 2.11 and 2.13.
                torch._C._autograd._unsafe_set_version_counter((one,), (one._version + 1,))


def divide_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Divide full state of divided parameters, which was loaded from a file."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if is_full and value.shape == parameter.shape:
                state[name] = Division.of(parameter).divided(value, parameter.device)
