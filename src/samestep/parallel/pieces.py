"""What a rank holds of each parameter: all of it, or its part where ranks divide it among them.

Parts are torch's DTensors in the model, and plain tensors that share their memory everywhere else: in the optimizer,
which moves each element by itself, in gradients, averages and checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from samestep.errors import InputError
from samestep.parallel.division import division_of
from samestep.runtime.world import World

# They move an element by its own gradient and state. What looks at a whole tensor (Adafactor, LBFGS, Muon) would
# look at a part of it.
_ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)


class Pieces:
    """What this rank holds of a model's parameters.

    Attributes:
        names: what stands for each trained parameter in the optimizer, with the model's name for it.
        own_names: the trained parameters as the model computes with them, with the same names.
        is_divided: some parameter is not whole on this rank.
        is_cut: the optimizer sees parts of parameters.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device = device
        self._own = dict(model.named_parameters())
        self._divisions = {name: division_of(p) for name, p in self._own.items() if isinstance(p, DTensor)}
        self._held = {name: _local(parameter) for name, parameter in self._own.items()}
        self.names = {self._held[name]: name for name, p in self._own.items() if p.requires_grad}
        self.own_names = {p: name for name, p in self._own.items() if p.requires_grad}
        self.is_divided = self.is_cut = bool(self._divisions)

    @property
    def held(self) -> dict[str, torch.nn.Parameter]:
        """What this rank has of each parameter, by the model's names."""
        return self._held

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Those of the trained ones."""
        return {name: held for held, name in self.names.items()}

    def take_gradients(self) -> None:
        """Move the gradients that a backward left in the model to what the optimizer holds."""
        for name in self._divisions:
            own, held = self._own[name], self._held[name]
            if own.grad is not None:
                gradient = own.grad
                assert isinstance(gradient, DTensor)
                held.grad = gradient.redistribute(placements=self._divisions[name].placements).to_local()
                own.grad = None

    def drop_gradients(self) -> None:
        """Forget the gradients that a backward left in the model."""
        for name in self._divisions:
            self._own[name].grad = None

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A parameter, or what belongs to it element by element, from the parts of all ranks; all of them call it."""
        division = self._divisions.get(name)
        if division is None or part.dim() != len(division.shape):
            return part  # a count of steps, say
        return division.whole(part)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor that has the parameter's shape; anything else as it is."""
        division = self._divisions.get(name)
        if division is None or whole.shape != division.shape:
            return whole
        return division.part(whole)

    def everywhere(self, values: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        """What belongs to parameters; every rank has something of each."""
        return values

    def total_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients together, the same on every rank."""
        if not self.is_divided:
            return get_total_norm([p.grad for p in self._held.values() if p.grad is not None])
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for groups, names in self._by_groups().items():
            present = [gradient for name in names if (gradient := self._held[name].grad) is not None]
            squares = [gradient.double().square().sum().to(self._device) for gradient in present]
            here = torch.stack(squares).sum() if squares else torch.zeros_like(total)
            for group in groups:
                dist.all_reduce(here, group=group)
            total += here
        return total.sqrt()

    def agree_on_overflow(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, world: World) -> None:
        """Let a gradient that overflowed in one rank's part count for all."""
        if self.is_divided and scaler.is_enabled():
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if not found:  # nothing is trained on this rank, which knows by the others alone
                found[self._device] = torch.zeros((), device=self._device)
            for flag in found.values():
                world.all_reduce(flag)

    def _by_groups(self) -> dict[tuple[dist.ProcessGroup, ...], list[str]]:
        """The names of the trained parameters by the groups that divide them."""
        found: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
        for name in self.names.values():
            division = self._divisions.get(name)
            found.setdefault(division.groups if division is not None else (), []).append(name)
        return found


def hand_over(optimizer: torch.optim.Optimizer, before: Iterable[torch.nn.Parameter], pieces: Pieces) -> None:
    """Give the optimizer what this rank holds in the place of the parameters that the model had `before`.

    Raises:
        InputError: it looks at whole tensors, or has begun already.
    """
    if not pieces.is_divided:
        return
    is_elementwise = type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith("torch.optim")
    if pieces.is_cut and not is_elementwise:
        raise InputError(
            f"the optimizer {type(optimizer).__name__} with parameters that ranks divide among them",
            rule=f"one that moves each element by itself: {', '.join(_ELEMENTWISE)} of torch.optim",
            do="take one of these, or a strategy that leaves parameters whole: ddp",
        )
    if optimizer.state:
        raise InputError(
            "the optimizer has made steps before the engine took it",
            rule="where ranks divide parameters, its state begins with the engine, or comes from a checkpoint",
            do="make the engine first",
        )
    now = dict(zip(before, pieces.held.values(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [now.get(parameter, parameter) for parameter in group["params"]]


def _local(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.detach()
    assert isinstance(part, DTensor)
    return torch.nn.Parameter(part.to_local(), parameter.requires_grad)
