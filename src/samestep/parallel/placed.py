"""A model whose parts are on several devices of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from samestep.config import StrategyPart
from samestep.errors import InputError
from samestep.parallel.balance import even_parts
from samestep.runtime.own_devices import own_devices
from samestep.runtime.world import World

_SHOWN = 3


@dataclass
class Placement:
    """Where the parts of a model are.

    Attributes:
        devices: of this rank; on a CPU they are stand-ins, all of them the CPU.
        numbers: by name, the modules that are on one device with all that is in them, and its number in `devices`.
        journal: for who wants to see how data travel: a list, to which each of these modules adds its name when it is
            handed its inputs.
    """

    devices: tuple[torch.device, ...]
    numbers: dict[str, int]
    journal: list[str] | None = None

    def picture(self) -> str:
        """What each device has, a line each: of modules within each other the outermost."""
        outermost = {
            name: number
            for name, number in self.numbers.items()
            if not any(outer in self.numbers for outer in _with_outer(name) if outer != name)
        }
        lines = []
        for number, device in enumerate(self.devices):
            names = [name or "the whole model" for name, where in outermost.items() if where == number]
            lines.append(f"device {number} ({device}): {', '.join(names) or 'nothing'}")
        return "\n".join(lines)


def place(model: nn.Module, world: World) -> Placement:
    """Move the parts of `model` to the devices of this rank, as its strategy says; inputs will follow them there.

    Raises:
        InputError: the strategy does not fit the model, or the devices are not there.
    """
    devices = own_devices(world)
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = _by_pattern(modules, world.strategy, len(devices)) if world.strategy.place else _in_order(model, devices)
    _require_place_for_all(modules, chosen)
    for name, module in modules.items():
        if _own_tensors(module):
            module._apply(_mover(devices[chosen[name]]), recurse=False)
    placement = Placement(devices, _on_one_device(modules, chosen))
    generator = _Generator(devices[0])
    model.register_forward_pre_hook(generator.begin)
    for name in placement.numbers:
        bring = partial(_bring, placement, name, generator)
        modules[name].register_forward_pre_hook(bring, with_kwargs=True)
    return placement


def require_meetings(world: World) -> None:
    """Refuse norm layers of one model on several GPUs where shards meet in them.

    Raises:
        InputError: these are GPUs.
    """
    if world.device.type == "cuda":
        raise InputError(
            "strategy placed with batch_norm: sync on GPUs",
            rule="shards that meet in a norm layer do so on one device",
            do="set batch_norm: shard",
        )


class _Generator:
    """The random generator of GPUs goes where the data goes, so that what is drawn does not depend on the placement."""

    def __init__(self, first: torch.device) -> None:
        self._first = self._now = first

    def begin(self, module: nn.Module, arguments: Any) -> None:
        self._now = self._first

    def enter(self, device: torch.device) -> None:
        if device.type == "cuda" and device != self._now:
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(self._now), device)
            self._now = device


def _bring(
    placement: Placement,
    name: str,
    generator: _Generator,
    module: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[Any, Any]:
    """Hand a module its inputs on its device."""
    device = placement.devices[placement.numbers[name]]
    generator.enter(device)
    if placement.journal is not None:
        placement.journal.append(name)
    moved: tuple[Any, Any] = tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), (arguments, named)
    )
    return moved


def _mover(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(device)


def _by_pattern(modules: dict[str, nn.Module], part: StrategyPart, devices: int) -> dict[str, int]:
    """The number of each module's device: what the last pattern says that matches it or a module it is in."""
    chosen: dict[str, int] = {}
    for pattern, number in part.place.items():
        if not 0 <= number < devices:
            raise InputError(
                f"strategy.place puts {pattern!r} on device {number}, and there are {devices}",
                rule=f"0 to {devices - 1}, as strategy.devices has it",
                do=f"set strategy.devices: {number + 1}" if number >= 0 else "count devices from 0",
            )
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            raise InputError(
                f"strategy.place: {pattern!r} matches no module",
                rule="shell patterns of module names, such as layers.*",
                do=f"names like {', '.join([name for name in modules if name][:_SHOWN])}",
            )
        chosen |= {name: number for name in modules if not set(_with_outer(name)).isdisjoint(matched)}
    return chosen


def _in_order(model: nn.Module, devices: tuple[torch.device, ...]) -> dict[str, int]:
    """Parts of like size, in order, of a model that says in what order it computes."""
    units = _units("", model)
    if list(units) == [""]:
        names = [name for name, _ in model.named_children()]
        example = f"'{names[0]}*': 0, '{names[-1]}*': 1" if len(names) > 1 else "'*': 0"
        raise InputError(
            f"strategy placed of a {type(model).__name__} without strategy.place",
            rule="parts of like size are made of an nn.Sequential, which computes in the order of its modules",
            do=f"say what goes where: set strategy.place: {{{example}}}",
        )
    sizes = [sum(p.nbytes for p in module.parameters()) for module in units.values()]
    filled = sum(size > 0 for size in sizes)
    if filled < len(devices):
        raise InputError(
            f"{len(devices)} devices for {filled} modules that have parameters",
            rule="each device gets a module at least",
            do=f"set strategy.devices: {max(filled, 1)}",
        )
    parts = even_parts(sizes, len(devices))
    return {
        f"{name}.{inner}" if inner else name: number
        for (name, module), number in zip(units.items(), parts, strict=True)
        for inner, _ in module.named_modules(remove_duplicate=False)
    }


def _units(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The modules that a sequential one computes one after another, those of sequential ones in it too."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return {name: module}
    found: dict[str, nn.Module] = {}
    for inner, child in module.named_children():
        found |= _units(f"{name}.{inner}" if name else inner, child)
    return found


def _require_place_for_all(modules: dict[str, nn.Module], chosen: dict[str, int]) -> None:
    """Refuse modules that have parameters or buffers and no place, and parameters that have two."""
    missing = [name for name, module in modules.items() if _own_tensors(module) and name not in chosen]
    if missing:
        raise InputError(
            f"strategy.place says nothing of {', '.join(name or 'the model itself' for name in missing[:_SHOWN])}"
            f"{f' and {len(missing) - _SHOWN} more' if len(missing) > _SHOWN else ''}",
            rule="each module that has parameters or buffers has a place",
            do="begin strategy.place with '*': 0, and say after it what is elsewhere",
        )
    where: dict[torch.Tensor, tuple[str, int]] = {}
    for name, module in modules.items():
        for tensor in _own_tensors(module):
            other, number = where.setdefault(tensor, (name, chosen[name]))
            if number != chosen[name]:
                raise InputError(
                    f"{other!r} on device {number} and {name!r} on device {chosen[name]} share a tensor",
                    rule="a tensor is on one device",
                    do="put them on the same device",
                )


def _on_one_device(modules: dict[str, nn.Module], chosen: dict[str, int]) -> dict[str, int]:
    """The modules all of whose tensors, and all of what is in them, are on one device."""
    numbers: dict[str, set[int]] = {name: set() for name in modules}
    for name, number in chosen.items():
        for outer in _with_outer(name):
            numbers[outer].add(number)
    return {name: found.pop() for name, found in numbers.items() if len(found) == 1}


def _own_tensors(module: nn.Module) -> set[torch.Tensor]:
    return {*module.parameters(recurse=False), *module.buffers(recurse=False)}


def _with_outer(name: str) -> Iterator[str]:
    """A module and those that it is in, from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
