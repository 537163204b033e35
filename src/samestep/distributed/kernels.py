"""Settings of torch that decide on kernels: deterministic ones, and products rounded to TF32."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.distributed.devices import is_accelerator

if TYPE_CHECKING:
    import torch

_NOT_DETERMINISTIC = ".* does not have a deterministic implementation"  # a warning of torch
# Operations that may round their inputs in float32, by torch's names. The functions below read and
# write all of their settings; they are private, in torch 2.11 and 2.13. Older functions, such as
# torch.get_float32_matmul_precision, raise an error after a script has used newer settings, such as
# `torch.backends.cuda.matmul.fp32_precision`.
_GPU_PRODUCTS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))

_PRODUCTS = (*_GPU_PRODUCTS, ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))

KERNEL_SETTINGS = (
    *(f"fp32_precision of {backend}.{operation}" for backend, operation in _PRODUCTS),
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.use_deterministic_algorithms",
)


def kernel_settings() -> tuple[str | bool, ...]:
    """Return the values of `KERNEL_SETTINGS`, which decide on torch's kernels and rounding."""
    import torch

    precision_of = torch._C._get_fp32_precision_getter
    return (
        *[precision_of(*operation) for operation in _PRODUCTS],
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def use_deterministic_kernels() -> bool:
    """Request kernels with the same bits each time; return whether settings had to change."""
    import torch

    (is_deterministic, warns), _, measures = KernelChoice.present()
    if is_deterministic and not warns and not measures:
        return False
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # selects kernels by their time
    return True


class KernelChoice(NamedTuple):
    """Settings of torch that decide between kernels with equal bits each time and faster ones."""

    # Of `torch.use_deterministic_algorithms`: whether it is on, and only warns of other operations.
    determinism: tuple[bool, bool]
    fills: bool  # new memory, before a program writes it; costs a pass over each tensor
    measures: bool  # cuDNN selects kernels by their time

    @classmethod
    def present(cls) -> KernelChoice:
        """Return the present settings."""
        import torch

        is_deterministic = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return cls((is_deterministic, warns), fills, torch.backends.cudnn.benchmark)

    def install(self) -> None:
        """Make these the settings of torch."""
        import torch

        is_deterministic, warns = self.determinism
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = self.fills  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = self.measures


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use deterministic kernels during the block; settings are those of the script after it."""
    before = KernelChoice.present()
    KernelChoice((True, False), fills=False, measures=False).install()
    try:
        yield
    finally:
        before.install()


class EqualKernels:
    """Deterministic kernels from the first whole call of a step to the step of the optimizer.

    A call that is computed whole, as the first one of each kind, is computed by every rank, with
    its backward. On a GPU, kernels that add by atomic operations, and kernels selected by their
    time, have other bits on every rank: replicas would drift apart. In a divided call each rank
    computes its own rows, with the settings of the script.

    Args:
        is_needed: whether other ranks compute the same on GPUs.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._before: KernelChoice | None = None
        self._own: KernelChoice | None = None

    def begin(self) -> None:
        """Request deterministic kernels; operations without one compute as before."""
        if not self._is_needed or self._own is not None:
            return
        self._before = KernelChoice.present()
        self._own = self._before._replace(measures=False)
        is_deterministic, _ = self._before.determinism
        if not is_deterministic:
            self._own = KernelChoice((True, True), fills=False, measures=False)
            warnings.filterwarnings("ignore", _NOT_DETERMINISTIC, UserWarning)
        self._own.install()

    def end(self) -> None:
        """Put the settings back, except for those that the script has changed since."""
        if self._before is None or self._own is None:
            return
        restored = list(KernelChoice.present())
        for index, (own, before) in enumerate(zip(self._own, self._before, strict=True)):
            if restored[index] == own:
                restored[index] = before
        KernelChoice._make(restored).install()
        self._own = None


def set_tf32(device: torch.device, *, allowed: bool | None) -> None:
    """Allow or forbid TF32 in products and convolutions on a GPU; None changes nothing."""
    if allowed is not None and is_accelerator(device):
        _set_tf32(allowed=allowed)


def _set_tf32(*, allowed: bool) -> None:
    import torch

    products, precision = ("high", "tf32") if allowed else ("highest", "ieee")
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = allowed
    for operation in _GPU_PRODUCTS:  # `torch.backends.fp32_precision` would have precedence
        torch._C._set_fp32_precision_setter(*operation, precision)


@contextmanager
def tf32_off() -> Iterator[None]:
    """Compute products and convolutions in float32 without rounded inputs during the block."""
    import torch

    cudnn = torch.backends.cudnn
    restore: list[Callable[[], Any]] = []
    with suppress(RuntimeError):  # follows from newer settings
        precision = torch.get_float32_matmul_precision()
        restore.append(partial(torch.set_float32_matmul_precision, precision))
    with suppress(RuntimeError):
        restore.append(partial(setattr, cudnn, "allow_tf32", cudnn.allow_tf32))
    for operation in _PRODUCTS:
        value = torch._C._get_fp32_precision_getter(*operation)
        restore.append(partial(torch._C._set_fp32_precision_setter, *operation, value))
    _set_tf32(allowed=False)
    try:
        yield
    finally:
        for function in restore:
            function()
