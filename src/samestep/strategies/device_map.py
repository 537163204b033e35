"""Device map: modules of one model on several devices of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from samestep.config import StrategyConfig
from samestep.distributed.devices import accelerator_module, is_accelerator, rank_devices
from samestep.distributed.world import World
from samestep.errors import InputError

_NAMED = 3  # modules named in an error
_device_map_error = partial(InputError, code="E_STRATEGY")


class _Mover:
    """Hooks that move inputs to the devices of modules. Draws do not depend on the device map.

    Args:
        first: device of the first random numbers of a forward.
    """

    def __init__(self, first: torch.device) -> None:
        self._first = first
        self._generator_device = first

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Hook of the model: later draws continue from those of the forward."""
        self._continue_on(self._first)

    def move(
        self, device: torch.device, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Hook of a module: move inputs and generator state to its device."""
        self._continue_on(device)
        moved: tuple[Any, Any] = tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
        )
        return moved

    def _continue_on(self, device: torch.device) -> None:
        """Let one stream of random numbers go through all devices, as on a single one."""
        if is_accelerator(device) and device != self._generator_device:
            accelerator = accelerator_module()
            accelerator.set_rng_state(accelerator.get_rng_state(self._generator_device), device)
            self._generator_device = device


def apply_device_map(model: nn.Module, world: World) -> None:
    """Move the modules of `model` to the devices of this rank; inputs follow them in forward.

    Raises:
        InputError: the strategy does not fit the model, or a device is missing.
    """
    config = world.strategy
    devices = rank_devices(config.name, config.devices, world.device, world.size)
    # With duplicates: a pattern may name any place of a module that stands in several.
    modules = dict(model.named_modules(remove_duplicate=False))
    if not config.place:
        raise _device_map_error(
            "strategy device_map without strategy.place",
            expected="a device for each module with parameters",
            fix="set strategy.place, such as {'features.*': 0, 'classifier.*': 1}",
        )
    assigned = _by_pattern(modules, config, len(devices))
    _require_one_device_per_tensor(modules, assigned)
    # Numbers of devices, descendants included.
    inside: dict[str, set[int]] = {name: set() for name in modules}
    for name, number in assigned.items():
        for outer in _with_ancestors(name):
            inside[outer].add(number)
    # Inputs move where a subtree is on one device; a module with several devices passes them on.
    mover = _Mover(devices[0])
    model.register_forward_hook(mover.end, always_call=True)
    for name, module in modules.items():
        if _own_tensors(module):
            # Not `module.to`, which would move the children, too.
            module._apply(partial(torch.Tensor.to, device=devices[assigned[name]]), recurse=False)
        if len(inside[name]) == 1:
            (number,) = inside[name]
            module.register_forward_pre_hook(partial(mover.move, devices[number]), with_kwargs=True)


def _by_pattern(
    modules: dict[str, nn.Module], config: StrategyConfig, devices: int
) -> dict[str, int]:
    """Return the device of each module: that of the last pattern for it or an ancestor."""
    assigned: dict[str, int] = {}
    # Later patterns replace earlier ones, so a general pattern comes first.
    for pattern, number in config.place.items():
        if not 0 <= number < devices:
            fix = "count devices from 0"
            if number >= 0:
                fix = f"set strategy.devices: {number + 1}"
            raise _device_map_error(
                f"strategy.place assigns {pattern!r} to device {number} of {devices}",
                expected=f"0 to {devices - 1}, according to strategy.devices",
                fix=fix,
            )
        matches = [name for name in modules if fnmatchcase(name, pattern)]
        if not matches:
            raise _device_map_error(
                f"strategy.place: {pattern!r} matches no module",
                expected="shell patterns of module names, such as layers.*",
                fix=f"use names such as {', '.join([name for name in modules if name][:_NAMED])}",
            )
        assigned |= {
            name: number for name in modules if not set(_with_ancestors(name)).isdisjoint(matches)
        }
    return assigned


def _require_one_device_per_tensor(modules: dict[str, nn.Module], assigned: dict[str, int]) -> None:
    first: dict[torch.Tensor, tuple[str, int]] = {}
    for name, module in modules.items():
        tensors = _own_tensors(module)
        if tensors and name not in assigned:
            raise _device_map_error(
                f"strategy.place assigns no device to {name or 'the model'}",
                expected="each module with parameters or buffers has a device",
                fix="begin strategy.place with '*': 0",
            )
        for tensor in tensors:
            # `to` would give each module a copy, and tied weights would part without a word.
            other, number = first.setdefault(tensor, (name, assigned[name]))
            if number != assigned[name]:
                raise _device_map_error(
                    f"{other!r} on device {number} and {name!r} on device {assigned[name]} "
                    "share a tensor",
                    expected="modules that share a tensor are on one device",
                    fix="assign both to the same device",
                )


def _own_tensors(module: nn.Module) -> set[torch.Tensor]:
    return {*module.parameters(recurse=False), *module.buffers(recurse=False)}


def _with_ancestors(name: str) -> Iterator[str]:
    """Iterate over a module's name and the names of its ancestors, innermost first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
