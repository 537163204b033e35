"""What ranks tell of torch, of its devices, and of their meeting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchView:
    """What torch sees.

    Attributes:
        nccl: the NCCL that is loaded; None for a build without.
        gpus: names, in torch's order.
        apart: pairs of GPUs of which the first cannot reach the second's memory.
        too_new: GPUs that this build of torch has no kernels for.
        failed: why CUDA does not work.
    """

    nccl: str | None = None
    gpus: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    too_new: tuple[str, ...] = ()
    failed: str | None = None


@dataclass(frozen=True)
class Met:
    """What ranks found that met.

    Attributes:
        wrong: what the sum of one number a rank came out as, where it came out wrong.
        seconds: of one all-reduce, the fastest of some.
        sent: bytes that it summed.
        resident: bytes of memory that rank 0 held.
    """

    ranks: int
    device: str
    wrong: float | None
    seconds: float
    sent: int
    resident: int

    @property
    def bandwidth(self) -> float:
        """Bytes a second over each link, as NCCL's own tests count them: a ring sends 2 (n - 1) / n of all."""
        return 2 * (self.ranks - 1) / self.ranks * self.sent / self.seconds
