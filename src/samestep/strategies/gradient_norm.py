"""Norms and overflows of gradients of stages on different ranks, for clipping and scaling.

Torch's clipping and gradient scaler read `.grad` of the stage of a rank, and would decide
differently on each. Their functions are replaced in this process once a module is split; gradients
of other modules reach the functions that were there before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from samestep.distributed.device_reads import device_reads
from samestep.errors import InputError
from samestep.strategies.dtensors import local_part
from samestep.view.messages import Ranks

TotalNorm = Callable[..., torch.Tensor]


def share_norms(split: Any, module: nn.Module, ranks: Ranks) -> None:
    """Let `clip_grad_norm_`, `get_total_norm` and `GradScaler` see the gradients of all ranks.

    Args:
        split: strategy of the module, a `Split`, while it exists.
        module: the module, while it exists.
        ranks: all ranks.
    """
    part = _Part(split, module, ranks)
    # Private: called by both public functions under the name that they look up, in torch 2.11 and
    # 2.13.
    clip_grad._get_total_norm = part.total_norm(clip_grad._get_total_norm)
    utilities: Any = nn.utils
    utilities.get_total_norm = part.total_norm(utilities.get_total_norm)
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = part.unscaling(scaler._unscale_grads_)


class _Part:
    """Gradients of one module on this rank."""

    def __init__(self, split: Any, module: nn.Module, ranks: Ranks) -> None:
        # Weak: the replaced functions stay until the end of the process.
        self._split = weakref.ref(split)
        self._module = weakref.ref(module)
        self._ranks = ranks

    def total_norm(self, before: TotalNorm) -> TotalNorm:
        """Return a function for gradients of all ranks; `before` has the norms of others."""

        def norm(
            tensors: torch.Tensor | Iterable[torch.Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            split: Any = self._split()
            module = self._module()
            if split is None or module is None:
                return before(gradients, norm_type, error_if_nonfinite, foreach)
            parameters = dict(module.named_parameters())
            asked = {id(gradient) for gradient in gradients}
            own = {
                id(one.grad): (name, one)
                for name, one in parameters.items()
                if one.grad is not None and id(one.grad) in asked
            }
            # A rank without gradients of its stage takes part, too.
            if not own and gradients:
                return before(gradients, norm_type, error_if_nonfinite, foreach)
            others = [gradient for gradient in gradients if id(gradient) not in own]
            if split.is_exact:
                # Complete gradients in one order: another sum has other bits.
                values = {name: {"": one.grad} for name, one in own.values()}
                full = {name: value for name, _, value in split.full_values(parameters, values)}
                # This rank does not know the script's order.
                every = [*full.values(), *others]
                return before(every, norm_type, error_if_nonfinite, foreach)
            if norm_type <= 0:
                raise InputError(
                    f"the norm of order {norm_type} of gradients that ranks divide",
                    expected="an order above 0: others are no sums over the ranks",
                    fix="norm_type=2.0, or infinity",
                    code="E_VALUE",
                )
            counted = {key for key, (_, one) in own.items() if split.counts(one)}
            parts = [local_part(gradient) for gradient in gradients if id(gradient) in counted]
            norms = [split.norm_of_parts(parts, float(norm_type), self._ranks)]
            if others:
                norms.append(device_reads.copy(before(others, norm_type, False, foreach).double()))
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
            if error_if_nonfinite and not math.isfinite(total):
                raise RuntimeError(
                    f"The total norm of order {norm_type} for gradients is non-finite"
                )
            # The sum is float64 on the host; the norm of torch is like its gradients.
            like = gradients[0] if gradients else torch.zeros(())
            return total.to(like.device, like.dtype)

        return norm

    def unscaling(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
            flags = before(scaler, optimizer, *arguments)
            module = self._module()
            if module is not None:
                groups = optimizer.param_groups
                updated = {parameter for group in groups for parameter in group["params"]}
                if not updated.isdisjoint(module.parameters()):
                    # A rank without gradients, as of a frozen stage, takes part, too.
                    device = next(iter(updated)).device
                    own = torch.zeros((), device=device)
                    for flag in flags.values():
                        own += flag.float().to(device)
                    # An overflow on one rank is one on all: every rank skips the step.
                    found = self._ranks.sum(own).clamp(max=1.0)
                    flags = flags or {device: found}
                    for flag in flags.values():
                        flag.copy_(found)
            return flags

        return unscale


def norm_of_ranks(
    parts: Sequence[torch.Tensor], order: float, ranks: Ranks, copies: int
) -> torch.Tensor:
    """Return the norm of parts of all ranks, as float64 on the host. A collective.

    Args:
        parts: parts that this rank counts.
        order: order of the norm.
        ranks: all ranks.
        copies: ranks that count the same part.
    """
    norms = torch.zeros(1)  # a stage may have no gradients
    if parts:
        norms = device_reads.copy(
            torch.stack([torch.linalg.vector_norm(part.double(), order) for part in parts])
        )
    own = torch.linalg.vector_norm(norms.double(), order)
    words = ranks.words([int(own.view(torch.int64))])  # the bits of a number
    every = torch.tensor(words, dtype=torch.int64).view(torch.float64).flatten()
    if math.isinf(order):
        return every.max() if order > 0 else every.min()
    return (every.pow(order).sum() / copies).pow(1 / order)
