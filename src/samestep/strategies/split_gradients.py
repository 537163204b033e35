"""Norms and overflows of gradients with parts on different ranks, for torch's clipping and gradient scaler.

Both read `.grad`, which is the part of one rank, and would decide differently on each. The
functions of torch are replaced in this process once a module is split; gradients of other modules
reach the functions that were there before.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import clip_grad

from samestep.distributed.device_reads import device_reads
from samestep.view.ranks import Ranks

TotalNorm = Callable[..., torch.Tensor]


class SplitParameters(Protocol):
    """Parameters of a module with parts on different ranks.

    Attributes:
        is_exact: gradients are added in one order on any number of ranks.
        has_stages: ranks hold different parameters.
    """

    is_exact: bool
    has_stages: bool

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank counts the gradient here of a parameter."""
        ...

    def norm_of_parts(
        self, parts: Sequence[torch.Tensor], order: float, ranks: Ranks
    ) -> torch.Tensor:
        """Return the norm of the parts of all ranks; a collective."""
        ...

    def full_values(
        self, parameters: Mapping[str, nn.Parameter], values: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield name, slot and full tensor of values that have the parts of parameters."""
        ...


def share_norms(split: SplitParameters, module: nn.Module, ranks: Ranks) -> None:
    """Let `clip_grad_norm_`, `get_total_norm` and `GradScaler` see the gradients of all ranks.

    Args:
        split: strategy of the module, while it exists.
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

    def __init__(self, split: SplitParameters, module: nn.Module, ranks: Ranks) -> None:
        self._split = weakref.ref(split)
        self._module = weakref.ref(module)
        self._ranks = ranks

    def total_norm(self, before: TotalNorm) -> TotalNorm:
        """Return a function that computes the norm of gradients of all ranks; `before` computes that of others."""

        def norm(
            tensors: torch.Tensor | Iterable[torch.Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            counted = self._counted()
            full = self._full(gradients)
            if full is not None:
                return before(full, norm_type, error_if_nonfinite, foreach)
            own = [gradient for gradient in gradients if id(gradient) in counted]
            split = self._split()
            # A rank without gradients of its stage takes part, too.
            if split is None or not (own or (not gradients and split.has_stages)):
                return before(gradients, norm_type, error_if_nonfinite, foreach)
            others = [gradient for gradient in gradients if id(gradient) not in counted]
            parts = [gradient for gradient in own if counted[id(gradient)]]
            norms = [split.norm_of_parts(parts, float(norm_type), self._ranks)]
            if others:
                norms.append(device_reads.copy(before(others, norm_type, False, foreach).double()))
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
            if error_if_nonfinite and not math.isfinite(total):
                raise RuntimeError(
                    f"The total norm of order {norm_type} for gradients is non-finite"
                )
            like = gradients[0] if gradients else torch.zeros(())
            return total.to(like.device, like.dtype)

        return norm

    def _full(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return complete gradients under `exact`, in the order of parameters: another sum has other bits."""
        split = self._split()
        module = self._module()
        if split is None or module is None or not split.is_exact:
            return None
        parameters = dict(module.named_parameters())
        asked = {id(gradient) for gradient in gradients}
        own = {
            name: {"": p.grad}
            for name, p in parameters.items()
            if p.grad is not None and id(p.grad) in asked
        }
        if not own and (gradients or not split.has_stages):
            return None
        here = {id(slots[""]) for slots in own.values()}
        others = [gradient for gradient in gradients if id(gradient) not in here]
        return [full for _, _, full in split.full_values(parameters, own)] + others

    def _counted(self) -> dict[int, bool]:
        """Return, for each gradient of the module here, whether this rank is the one that counts it."""
        split = self._split()
        module = self._module()
        if split is None or module is None:
            return {}
        gradients = ((parameter, parameter.grad) for parameter in module.parameters())
        return {
            id(gradient): split.counts(parameter)
            for parameter, gradient in gradients
            if gradient is not None
        }

    def unscaling(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Return `GradScaler._unscale_grads_` with flags of overflow that are equal on all ranks."""

        def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
            flags = before(scaler, optimizer, *arguments)
            module = self._module()
            parameters: set[nn.Parameter] = set() if module is None else set(module.parameters())
            updated = (
                parameter for group in optimizer.param_groups for parameter in group["params"]
            )
            if not parameters.isdisjoint(updated):
                for flag in flags.values():
                    flag.copy_(self._ranks.sum(flag.float()).clamp(max=1.0))
            return flags

        return unscale


def combined(
    parts: Sequence[torch.Tensor], order: float, ranks: Ranks, copies: int
) -> torch.Tensor:
    """Return the norm of parts of all ranks, as float64 on the host.

    Args:
        parts: parts that this rank counts.
        order: order of the norm.
        ranks: all ranks.
        copies: ranks that count the same part.
    """
    norms = torch.zeros(1)
    if parts:
        norms = device_reads.copy(
            torch.stack([torch.linalg.vector_norm(part.double(), order) for part in parts])
        )
    words = _float_words(torch.linalg.vector_norm(norms.double(), order), ranks)
    every = torch.tensor([word[0] for word in words], dtype=torch.float64)
    if math.isinf(order):
        if order > 0:
            return every.max()
        return every.min()
    return (every.pow(order).sum() / copies).pow(1 / order)


def _float_words(value: torch.Tensor, ranks: Ranks) -> list[list[float]]:
    words = ranks.words([int(value.double().view(torch.int64))])
    values: list[list[float]] = torch.tensor(words, dtype=torch.int64).view(torch.float64).tolist()
    return values
