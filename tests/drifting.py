"""Models that recipes of tests name by import path, and that do not stay the same on every rank."""

import torch
import torch.distributed as dist

from recorded import Net


class Drifting(Net):
    """Turns one bit of its last layer over, on one rank, in one of the training forwards of that rank."""

    def __init__(self, *, rank: int, call: int) -> None:
        super().__init__()
        self._rank, self._call, self._calls = rank, call, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._calls += 1
            if dist.get_rank() == self._rank and self._calls == self._call:
                with torch.no_grad():
                    self[5].weight.view(torch.int32)[0, 0] ^= 1
        return super().forward(images)
