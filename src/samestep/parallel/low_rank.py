"""Gradients that travel as products of two narrow matrices.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
torch's own hook averages, adds up in threads of its own and draws from the process's generator, so it is written here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samestep.parallel.flat import taken_apart
from samestep.runtime.world import World

_RANK = 4
_LEAST_GAIN = 2  # a matrix that is not made smaller by as much travels whole

Parameter = torch.nn.Parameter


class LowRankSum:
    """Sums over ranks what few directions of each matrix hold; a rank keeps the rest and adds it in its next step.

    What is kept, and the directions that were found last, are this rank's alone and not in a checkpoint.
    """

    def __init__(self, world: World, parameters: Sequence[Parameter]) -> None:
        self._world = world
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._rest: dict[Parameter, torch.Tensor] = {}
        self._directions: dict[Parameter, torch.Tensor] = {}

    def __call__(self, parameters: Sequence[Parameter], total: torch.Tensor) -> torch.Tensor:
        """Replace the gradients of `parameters` in the flat tensor `total` by their sum over ranks, approximately."""
        gradients = dict(zip(parameters, taken_apart(total, parameters), strict=True))
        narrow = [parameter for parameter in parameters if is_made_narrow(parameter)]
        matrices = {p: _as_matrix(gradients[p]) + self._rest.get(p, 0) for p in narrow}
        whole = [gradients[parameter] for parameter in parameters if parameter not in matrices]
        found = self._summed([*(matrices[p] @ self._directions_of(p) for p in narrow), *whole])
        for gradient, value in zip(whole, found[len(narrow) :], strict=True):
            gradient.copy_(value)
        lefts = [torch.linalg.qr(left).Q for left in found[: len(narrow)]]
        mine = [matrices[p].T @ left for p, left in zip(narrow, lefts, strict=True)]
        rights = self._summed([right.clone() for right in mine])
        # Sums are the same on every rank, so all of them keep what they find, or none does.
        is_finite = torch.stack([value.isfinite().all() for value in [*found, *rights]]).all()
        for p, left, own, right in zip(narrow, lefts, mine, rights, strict=True):
            gradients[p].copy_((left @ right.T).view(p.shape))
            before = self._rest.get(p, torch.zeros_like(matrices[p]))
            self._rest[p] = torch.where(is_finite, matrices[p] - left @ own.T, before)
            self._directions[p] = torch.where(is_finite, right, self._directions_of(p))
        return total

    def _summed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum of each over ranks; all of them in one message."""
        if not tensors:
            return []
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._world.all_reduce(message)
        values = message.split([tensor.numel() for tensor in tensors])
        return [value.view(tensor.shape) for value, tensor in zip(values, tensors, strict=True)]

    def _directions_of(self, parameter: Parameter) -> torch.Tensor:
        if parameter not in self._directions:
            # A generator of its own, seeded alike on every rank: what the model draws is not disturbed.
            generator = torch.Generator().manual_seed(self._numbers[parameter])
            columns = parameter.numel() // parameter.shape[0]
            drawn = torch.randn(columns, _RANK, generator=generator, dtype=torch.float64)
            self._directions[parameter] = drawn.to(parameter)
        return self._directions[parameter]


def is_made_narrow(parameter: torch.Tensor) -> bool:
    """Whether two narrow matrices are worth while for a parameter."""
    if parameter.dim() < 2 or parameter.numel() == 0 or parameter.element_size() < 4:
        return False
    rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    return _LEAST_GAIN * _RANK * (rows + columns) < rows * columns


def _as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(gradient.shape[0], -1)
